"""Soft tokens in files, and traces of a tiny model for them to learn from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvbench.contract.policy import TrainedFor
from kvbench.learn.collect import TraceConfig, collect
from kvbench.learn.trace import TraceSet
from kvbench.policies.judgeq.checkpoint import SoftTokens, write_tokens
from kvbench.policies.judgeq.recipe import JudgeQRecipe
from tests.kvp.make import model_folder, story_added
from tests.tiny import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS

WIDTH = QUERY_HEADS * HEAD_DIM
QUICK = JudgeQRecipe(steps=12, tokens=4, lr=3e-2, warmup=2, validation=0.2)


def tokens_file(path: Path, embeddings: Tensor, sha256: str, layers: int = LAYERS) -> str:
    fits = TrainedFor(layers, KV_HEADS, HEAD_DIM, sha256)
    card = {"model": "tiny", "model_sha256": sha256, "validation_cost": 1.5}
    write_tokens(path, SoftTokens(embeddings, fits, card))
    return str(path)


def drawn(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)) * 0.3


def recorded(folder: Path, arch: str = "llama", samples: int = 6, **changes: str) -> TraceSet:
    """Stories of 50 tokens or so, stored exactly, read by a tiny model."""
    model = model_folder(folder / "model", arch)
    settings: dict[str, str] = {"length": "50-60", "store": "float32"} | changes
    config = TraceConfig(
        ("story",), samples, str(folder / "traces"), model, device="cpu", dtype="float32", **settings
    )
    with story_added():
        return collect(config, progress=False)
