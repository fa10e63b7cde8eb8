"""Files of weights: what goes in comes out, and anything else is refused with what to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvbench.contract.registry import POLICIES
from kvbench.errors import BadInput
from kvbench.policies.kvp import policy
from kvbench.policies.kvp.checkpoint import read_weights, write_weights
from kvbench.policies.kvp.scorer import ScorerShape, scores
from tests.kvp.make import random_weights, weights_file

SHAPE = ScorerShape(layers=2, kv_heads=2, dim=4, hidden=6, position="sinusoidal")
CARD = {"model": "tiny", "model_sha256": "5e", "recipe": {"steps": 3}, "validation_cost": 1.25, "seed": 0}


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "w.safetensors"
    weights = random_weights(SHAPE)
    write_weights(path, weights, SHAPE, CARD)
    found, shape, card, _ = read_weights(path)
    assert (shape, card) == (SHAPE, CARD)
    for name, tensor in weights.tensors().items():
        stored = tensor.half().float() if name in ("w1", "w2") else tensor
        assert torch.equal(found.tensors()[name], stored), name
    x = torch.randn(SHAPE.agents, 20, SHAPE.inputs, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(scores(found, x), scores(weights, x), atol=0.02)
    assert [file.name for file in path.parent.iterdir()] == ["w.safetensors"]


def test_it_is_safetensors_with_a_readable_card(tmp_path: Path) -> None:
    """No pickle: 8 bytes of length, a JSON header that holds the card, then numbers."""
    path = tmp_path / "w.safetensors"
    write_weights(path, random_weights(SHAPE), SHAPE, CARD)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert json.loads(header["__metadata__"]["card"]) == CARD
    assert json.loads(header["__metadata__"]["shape"]) == asdict(SHAPE)
    with safe_open(str(path), "pt") as file:
        assert set(file.keys()) == {"mean", "scale", "w1", "b1", "w2", "b2"}
        assert file.get_tensor("w1").dtype == torch.float16


def rewritten(path: Path, change: str) -> None:
    """The file of `SHAPE`, with one thing wrong."""
    tensors = {name: tensor.contiguous() for name, tensor in random_weights(SHAPE).tensors().items()}
    metadata = {"card": json.dumps(CARD), "shape": json.dumps(asdict(SHAPE))}
    if change == "tensor missing":
        del tensors["b2"]
    elif change == "tensor too many":
        tensors["b3"] = torch.zeros(1)
    elif change == "no card":
        del metadata["card"]
    elif change == "no shape":
        del metadata["shape"]
    elif change == "no fingerprint":
        metadata["card"] = json.dumps({"model": "tiny"})
    elif change == "other setting":
        metadata["shape"] = json.dumps(asdict(SHAPE) | {"activation": "gelu"})
    elif change == "other position":
        metadata["shape"] = json.dumps(asdict(SHAPE) | {"position": "rotary"})
    save_file(tensors, path, metadata=metadata)


CHANGES = [
    "tensor missing", "tensor too many", "no card", "no shape", "no fingerprint", "other setting",
    "other position",
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_other_safetensors_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "w.safetensors"
    rewritten(path, change)
    with pytest.raises(BadInput, match=r"w\.safetensors|rotary"):
        POLICIES.parse(f"kvp:weights={path}").trained_for  # noqa: B018 - reads the file


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    other = ScorerShape(layers=2, kv_heads=2, dim=4, hidden=7, position="sinusoidal")
    write_weights(path, random_weights(other), SHAPE, CARD)
    with pytest.raises(BadInput, match="w1, b1, w2 do not have the shape"):
        read_weights(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04 a pickled model", b"\xff" * 64])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"w\.safetensors is not a file of KVP weights"):
        read_weights(path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="kvbench train"):
        read_weights(tmp_path / "w.safetensors")
    with pytest.raises(BadInput, match="kvbench train"):
        POLICIES.parse(f"kvp:weights={tmp_path}").trained_for  # noqa: B018 - a folder is no file


def test_shipped_weights_go_by_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_file(tmp_path / "poems.safetensors", SHAPE, "aa")
    weights_file(tmp_path / "songs.safetensors", SHAPE, "bb")
    monkeypatch.setattr(policy, "WEIGHTS", tmp_path)
    assert POLICIES.parse("kvp:weights=songs").trained_for.sha256 == "bb"
    assert POLICIES.parse("kvp:weights=poems").trained_for.sha256 == "aa"
    with pytest.raises(BadInput, match=r"kvp:weights=sons: .*poems, songs.*kvbench train"):
        POLICIES.parse("kvp:weights=sons").trained_for  # noqa: B018


def test_a_file_trained_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    given: Any = POLICIES.parse(f"kvp:weights={weights_file(path, SHAPE, 'aa')}")
    assert given.trained_for.sha256 == "aa"
    weights_file(path, SHAPE, "bb", seed=1)
    assert given.trained_for.sha256 == "bb"
