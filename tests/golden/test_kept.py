"""Kept positions of every built-in policy on one fixed layer: a change of ranking cannot go unseen.

After a change that is meant, `KVBENCH_WRITE_GOLDENS=1 python -m pytest tests/golden` rewrites the
files; the difference then belongs into the same commit, with its reason. Files: one per spec, budget
-> kept positions of KV heads 0 and 1.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path

import pytest
import torch

from kvbench.contract.observation import Observation
from kvbench.contract.registry import POLICIES
from kvbench.contract.shared_work import SharedWork
from kvbench.engine.order import keep, rank
from tests.scene import DIM, KV_HEADS, QUERY_HEADS, scene

FOLDER = Path(__file__).parent
WRITE = "KVBENCH_WRITE_GOLDENS"
BUDGETS = (3, 24, 48, 96)
SLOTS = 120
SPECS = (
    "random",
    "streaming_llm",
    "knorm",
    "keydiff",
    "lagkv",
    "lagkv:sinks=2,lag=16",
    "tova",
    "snapkv",
    "snapkv:window=8,kernel=5,pooling=avg",
    "oracle",
)


def file_of(spec: str) -> Path:
    return FOLDER / (spec.replace(":", "-").replace(",", "-").replace("=", "") + ".json")


def fixed_layer() -> Observation:
    """120 tokens in one go. Numbers come from Python's generator, whose stream never changes, in steps
    of 1/64, which every dtype and machine holds exactly."""
    draw = random.Random(2309)

    def tensor(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([draw.randrange(-128, 129) / 64 for _ in range(count)]).view(shape)

    keys, values = tensor(1, KV_HEADS, SLOTS, DIM), tensor(1, KV_HEADS, SLOTS, DIM)
    queries, future = tensor(1, QUERY_HEADS, SLOTS, DIM), tensor(1, KV_HEADS, SLOTS).abs()
    return dataclasses.replace(
        scene(SLOTS), keys=keys, values=values, _queries=queries, _future=lambda: future, _shared=SharedWork()
    )


def kept_positions(spec: str) -> dict[str, list[list[int]]]:
    policy, seen = POLICIES.parse(spec), fixed_layer()
    order = rank(policy.score(seen.limited_to(policy.needs)), seen.positions, policy.pins, seen.seen)
    return {str(budget): seen.positions.gather(2, keep(order, budget))[0].tolist() for budget in BUDGETS}


@pytest.mark.parametrize("spec", SPECS)
def test_kept_positions_have_not_changed(spec: str) -> None:
    path = file_of(spec)
    kept = kept_positions(spec)
    if os.environ.get(WRITE):
        lines = [f'"{budget}": {json.dumps(heads)}' for budget, heads in kept.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.skip(f"{path.name} was written: {WRITE} is set")
    assert kept == json.loads(path.read_text()), f"if this is meant: {WRITE}=1 python -m pytest tests/golden"


def test_every_golden_file_is_checked() -> None:
    assert set(FOLDER.glob("*.json")) == {file_of(spec) for spec in SPECS}
