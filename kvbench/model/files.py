"""The files of a model: whether they are all there, whole, free of code, and which model they are."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadInput, KvbenchError
from ..model import gguf

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each weights file, for the fingerprint


def check_folder(folder: Path) -> None:
    """Refuse a folder without configuration or weights. Raises BadInput."""
    if not folder.is_dir():
        raise BadInput(
            f"model folder {folder} does not exist; give a folder with config.json and safetensors"
        )
    missing = [pattern for pattern in ("config.json", "*.safetensors") if not any(folder.glob(pattern))]
    if missing:
        raise BadInput(
            f"model folder {folder} has no {' and no '.join(missing)}; give a folder in the transformers "
            "format (config.json, tokenizer.json, *.safetensors), as save_pretrained writes it"
        )


def check_weights(folder: Path) -> None:
    """Refuse weights files that are cut off, damaged or missing, from their headers alone."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with readable(folder):
            wanted = set(json.loads(index.read_text())["weight_map"].values())
        absent = sorted(name for name in wanted if not (folder / name).is_file())
        if absent:
            raise BadInput(
                f"model folder {folder} lacks {', '.join(absent)}, as after a download that was interrupted: "
                f"{_again(folder)}"
            )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{file} is damaged or cut off ({error}): {_again(folder)}") from error


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder without tokenizer: transformers would make one up."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise BadInput(
            f"model folder {folder} has no tokenizer ({' or '.join(TOKENIZERS)}): {_again(folder)}"
        )


def check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would have made up, or left out for their shape."""
    faults = [
        f"{len(names)} tensors {words}, the first {min(map(str, names))}"
        for key, words in (("missing_keys", "missing"), ("mismatched_keys", "of another shape"))
        if (names := report.get(key))
    ]
    if faults:
        raise BadInput(
            f"model folder {folder}: weights that do not fit config.json ({'; '.join(faults)}): "
            f"{_again(folder)}"
        )


@contextlib.contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turns what transformers says of broken files, or of files that want to run code, into BadInput."""
    try:
        yield
    except KvbenchError:
        raise
    except Exception as error:  # each library has its own
        told = str(error).strip().splitlines()
        what = told[0][:200] if told else type(error).__name__
        if "trust_remote_code" in str(error):
            raise BadInput(
                f"model folder {folder} comes with code of its own, which kvbench never runs: use a model "
                "that transformers itself supports"
            ) from error
        if "out of memory" in str(error).lower():
            raise BadInput(
                f"model folder {folder} does not fit into memory ({what}): use --dtype bfloat16, a smaller "
                "model or a larger machine"
            ) from error
        raise BadInput(
            f"model folder {folder} cannot be read ({what}): {_again(folder)}, or check that transformers "
            "supports this model"
        ) from error


def _again(folder: Path) -> str:
    """How to get a folder of files anew."""
    if folder.parent == gguf.cache_root():
        return "delete the folder, and it is converted again"
    return "download or save it again"


def fingerprint_folder(folder: Path) -> str:
    """SHA-256 of configuration, tokeniser and weights of a model folder.

    Of each weights file only name, size, header and 64 blocks of 4 KiB at fixed places are read, so
    that gigabytes take milliseconds: it tells models apart, it does not prove integrity. The library
    version that wrote the configuration does not count.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    for key in ("transformers_version", "_name_or_path", "_attn_implementation"):
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted([*folder.glob("tokenizer.json"), *folder.glob("chat_template.jinja")]):
        digest.update(file.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(f"{file.name} {size}".encode() + stream.read(min(header, 1 << 26)))
            for index in range(SAMPLES):
                stream.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
