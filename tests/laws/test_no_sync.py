"""The host waits for the device a fixed number of times per sample, and never while the model reads.

A wait is anything that brings numbers of a tensor to the host: item, tolist, bool, cpu, numpy, or an
operation whose size depends on them. On the CPU nothing waits, but every one of these would on a GPU.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvbench.contract.need import Need
from kvbench.contract.registry import POLICIES
from kvbench.engine import write
from kvbench.engine.attention import Pass
from kvbench.engine.evaluate import evaluate
from tests.laws.lab import KEY, SCHEDULES, SPECS, N, cells_of, loaded, prompt_of, sample_of
from tests.tiny import LAYERS

NAMES = (
    "item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal", "allclose", "__bool__",
    "__int__", "__float__", "__index__", "__array__", "__contains__",
)  # fmt: skip


def two_passes(spec: str) -> bool:
    return Need.SECOND_PASS in POLICIES.parse(spec).needs


SECOND = sum(map(two_passes, SPECS))  # each waits once, for what it read


class Waits(TorchFunctionMode):
    """Counts waits by the line of ours that caused them. inside: only those while the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()
        self.reading = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        moved = name == "to" and any(str(arg) == "cpu" for arg in (*args[1:], *(kwargs or {}).values()))
        if name in NAMES or (moved and args[0].device.type != "cpu"):
            caller = traceback.extract_stack(limit=2)[0]
            where = f"{caller.filename.rpartition('/')[2]}:{caller.lineno} {name}"
            self.lines[where] += 1
            if self.reading:
                self.inside[where] += 1
        return func(*args, **(kwargs or {}))


def waits(cells: Any, new: int = 12, **prompt: Any) -> Waits:
    """All waits of one sample."""
    lm = dataclasses.replace(loaded("llama"), eos_ids=frozenset())
    assert lm.parts  # read once for a model
    given = prompt_of(**prompt)
    attend = Pass.attend
    counted = Waits()

    def watched(self: Pass, *args: Any) -> Any:
        counted.reading += 1
        try:
            return attend(self, *args)
        finally:
            counted.reading -= 1

    with patch.object(Pass, "attend", watched), patch.object(write, "LOOK_EVERY", {"cpu": 100}), counted:
        evaluate(lm, sample_of(given, new=new), given, cells, KEY)
    return counted


@pytest.mark.parametrize("choices", [False, True])
def test_waits_do_not_grow(choices: bool) -> None:
    """Not with policies, budgets or tokens: what is needed is read once for all."""
    one = waits(cells_of(("knorm",), (8,)), choices=choices)
    many = waits(cells_of(SPECS, (8, 20, 33, N)), choices=choices, new=40)
    assert one.lines.keys() <= many.lines.keys()
    assert max(many.lines.values()) <= 2 + SECOND, many.lines  # of the full cache, and of all kept sets
    assert many.lines.total() <= one.lines.total() + 2 + SECOND, many.lines  # the future's rank apart, too


def test_waits_of_chunks() -> None:
    """Two per chunk: which policies failed, and which kept sets are equal; one more for a second pass."""
    one = waits(cells_of(("knorm",), (8,), "chunked", 10))
    many = waits(cells_of([spec for spec in SPECS if not two_passes(spec)], (8, 20, 33), "chunked", 10))
    assert many.lines == one.lines
    assert max(many.lines.values()) <= -(-N // 10)
    all_of_them = waits(cells_of(SPECS, (8, 20, 33), "chunked", 10))
    assert all_of_them.lines.total() == one.lines.total() + SECOND * -(-N // 10)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_waits_while_the_model_reads(schedule: str) -> None:
    done = waits(cells_of(SPECS, (8, 33), schedule))
    assert done.lines.total() > 0
    assert not done.inside


def test_the_count_counts() -> None:
    """Each kind of wait is seen, or this file proves nothing."""
    x = torch.ones(2)
    with Waits() as counted:
        (
            bool(x[0]),
            int(x[0]),
            float(x[0]),
            x.tolist(),
            x[0].item(),
            x.numpy(),
            x.cpu(),
            x.nonzero(),
            x.unique(),
        )
        if x[0]:
            pass
        torch.equal(x, x)
        _ = [1, 2][x[0].long()]
    names = Counter(line.split()[-1] for line in counted.lines.elements())
    assert names["__bool__"] == 2
    for name in (
        "__int__",
        "__float__",
        "tolist",
        "item",
        "numpy",
        "cpu",
        "nonzero",
        "unique",
        "equal",
        "__index__",
    ):
        assert names[name] >= 1, name


def test_a_wait_in_a_policy_is_seen() -> None:
    """The old way of checking scores would be found."""
    from kvbench.engine import ranking as loop
    from kvbench.engine.score import score_and_flag

    def eager(*args: Any) -> Any:
        score, finite = score_and_flag(*args)
        assert finite.all().item()
        return score, finite

    with patch.object(loop, "score_and_flag", eager):
        done = waits(cells_of(SPECS, (8,)))
    late = 1 + SECOND  # the oracle, and those with a second pass, rank when the model has read
    assert done.inside.total() == LAYERS * (len(SPECS) - late)
