"""Things to learn from: a model folder, a task of sentences of any length, traces made of numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.contract.policy import param
from kvbench.contract.registry import TASKS, register_task
from kvbench.contract.task import Answer, Sample, Samples, Setting, Task
from kvbench.learn.trace import TraceInfo, TraceSet, TraceWriter
from kvbench.policies.kvp.checkpoint import write_weights
from kvbench.policies.kvp.recipe import KVPRecipe
from kvbench.policies.kvp.scorer import ScorerShape, ScorerWeights
from tests.tiny import tiny_model, tiny_tokenizer

LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 2, 8
TOKENS, CONTEXT = 60, 40
WORDS = ("hello", "world", "the answer", "is", "yes", "no", "in it", "1234", "lower")

# Small and fast; nothing is pinned, because these contexts are short.
QUICK = KVPRecipe(steps=20, hidden=16, warmup=5, lr=1e-2, position="none", pins="none", validation=0.2)


@dataclass(frozen=True)
class Story(Task):
    """Random words until the prompt has `length` tokens or a few more, and a question about them."""

    metric = "nll"
    question = "withheld"
    data = "written here"

    length: int = param(48, "none")

    def samples(self, setting: Setting) -> Samples:
        made = [self._sample(index, setting) for index in range(setting.limit or 4)]
        return Samples(made, "the tests' own story", "0" * 64)

    def _sample(self, index: int, setting: Setting) -> Sample:
        draw = random.Random(f"{setting.seed} {index}")
        words: list[str] = []
        while True:
            words.append(draw.choice(WORDS))
            text = " ".join(words) + "."
            sample = Sample(str(index), text, " is it in", " yes it is", gold="yes")
            if setting.count(sample) >= self.length:
                return sample

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        return {}


@contextmanager
def story_added() -> Iterator[None]:
    """The task `story` is known inside the block only."""
    with (
        patch.object(TASKS, "_places", dict(TASKS._found())),
        patch.object(TASKS, "_classes", dict(TASKS._classes)),
    ):
        register_task("story", source="tests")(Story)
        yield


def model_folder(folder: Path, arch: str = "llama", seed: int = 0) -> str:
    tiny_model(arch, "sdpa", seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def numbers(seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per layer queries, keys, values. Every query of a group looks in one direction of its keys."""
    layers = []
    for layer in range(LAYERS):
        wanted = torch.randn(KV_HEADS, DIM, generator=torch.Generator().manual_seed(layer))
        draw = torch.Generator().manual_seed(1000 * (layer + 1) + seed)
        noise = torch.randn(KV_HEADS * GROUP, TOKENS, DIM, generator=draw) * 0.3
        queries = 2.5 * torch.nn.functional.normalize(wanted, dim=-1).repeat_interleave(GROUP, 0)[:, None]
        keys = torch.randn(KV_HEADS, TOKENS, DIM, generator=draw) * 2
        values = torch.randn(KV_HEADS, TOKENS, DIM, generator=draw)
        layers.append((queries + noise, keys, values))
    return layers


def synthetic(folder: Path, count: int = 6, change: tuple[int, int] | None = None, seed: int = 0) -> TraceSet:
    """Traces of numbers. change: the (layer, KV head) whose contents are others than without it."""
    writer = TraceWriter(folder, header(seed))
    for index in range(count):
        layers = numbers(seed + index)
        if change is not None:
            layer, head = change
            for tensor, other in zip(layers[layer], numbers(seed + index + 500)[layer], strict=True):
                size = tensor.shape[0] // KV_HEADS
                part = slice(head * size, (head + 1) * size)
                tensor[part] = other[part]
        stored = [tuple(tensor.half() for tensor in tensors) for tensors in layers]
        writer.add(TraceInfo(f"synthetic|{index}", TOKENS, CONTEXT, "synthetic", DIM**-0.5), stored)  # type: ignore[arg-type]
    writer.flush()
    return TraceSet(folder)


def header(seed: int = 0) -> dict[str, Any]:
    return {
        "model": "synthetic",
        "model_sha256": "5e",
        "layers": LAYERS,
        "query_heads": KV_HEADS * GROUP,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "dtype": "float16",
        "tasks": ["synthetic"],
        "length": None,
        "seed": seed,
        "under": None,
    }


def random_weights(shape: ScorerShape, seed: int = 0) -> ScorerWeights:
    """Weights of a trained look: no tensor is zero or one."""
    draw = torch.Generator().manual_seed(seed)
    weights = ScorerWeights.initial(shape, draw)
    for name, tensor in weights.tensors().items():
        noise = torch.randn(tensor.shape, generator=draw)
        setattr(weights, name, noise.abs() + 0.5 if name == "scale" else tensor * 0.5 + 0.3 * noise)
    return weights


def weights_file(path: Path, shape: ScorerShape, sha256: str, seed: int = 0) -> str:
    card = {"model": "tiny", "model_sha256": sha256, "validation_cost": 1.5}
    write_weights(path, random_weights(shape, seed), shape, card)
    return str(path)
