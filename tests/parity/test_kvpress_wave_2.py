"""Kept sets of the second wave of rankings and of kvpress 0.5 on one real model; see test_kvpress.py.

Sums of float32 in another order may swap tokens whose scores are equal up to rounding: those at the cut, and
no others, may differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES

from .test_kvpress import BUDGETS, LAYERS, TOKENS, Recorded, layers, ours, presses

__all__ = ["layers", "presses"]  # fixtures
pytestmark = pytest.mark.model
NEAR = 1e-5  # relative


def assert_same_kept(policy: Policy, one: Recorded, score: Tensor, budget: int) -> None:
    """Our kept set is the top of their score, near-ties at the cut aside."""
    for head, kept in enumerate(ours(policy, one.seen, budget)):
        row = score[0, head].double()
        cut = row.topk(budget).values[-1]
        near = (row - cut).abs() <= NEAR * cut.abs()
        mine = torch.zeros(TOKENS, dtype=torch.bool)
        mine[kept] = True
        assert bool((mine == (row >= cut))[~near].all()), f"layer {one.seen.layer}, head {head}"


def compressed(press: Any, one: Recorded, ratio: float) -> Tensor:
    """The keys that a press keeps: (kv_head, kept, dim)."""
    press.compression_ratio = ratio
    keys, _ = press.compress(one.module, one.hidden, one.seen.keys, one.seen.values, None, {})
    return keys[0]


def gathered(policy: Policy, one: Recorded, budget: int) -> Tensor:
    kept = torch.tensor(ours(policy, one.seen, budget))
    return one.seen.keys[0].gather(1, kept[..., None].expand(-1, -1, one.seen.keys.shape[-1]))


@pytest.mark.parametrize("budget", BUDGETS)
def test_observed_attention(layers: list[Recorded], presses: Any, budget: int) -> None:
    assert len(layers) == len(LAYERS)
    for one in layers:
        group = one.seen._queries.shape[1] // one.seen.keys.shape[1]
        logits = one.seen._queries @ one.seen.keys.repeat_interleave(group, 1).mT * one.seen.scaling
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        attention = logits.masked_fill(later, -torch.inf).softmax(-1)
        press = presses.ObservedAttentionPress()
        score = press.score(one.module, one.hidden, one.seen.keys, one.seen.values, attention, {})
        assert_same_kept(POLICIES.parse("observed_attention"), one, score, budget)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("leverage", "kind"),
    [("product", "kv_product"), ("keys", "key"), ("values", "value"), ("mean", "kv_avg")],
)
def test_cur(layers: list[Recorded], presses: Any, leverage: str, kind: str, budget: int) -> None:
    """Its sinks, of score 1, are our pins."""
    for one in layers:
        score = one.score(presses.CURPress(leverage_type=kind))
        assert_same_kept(POLICIES.parse(f"cur:leverage={leverage}"), one, score, budget)


@pytest.mark.parametrize(("base", "press"), [("knorm", "KnormPress"), ("keydiff", "KeyDiffPress")])
@pytest.mark.parametrize("budget", [60, 140, 320, 560])
def test_chunk_kv_with_a_budget_of_whole_chunks(
    layers: list[Recorded], presses: Any, base: str, press: str, budget: int
) -> None:
    """kvpress keeps whole chunks only: budgets are multiples of 20. Bases without pins."""
    for one in layers:
        kept = compressed(presses.ChunkKVPress(getattr(presses, press)()), one, 1 - (budget + 0.5) / TOKENS)
        assert torch.equal(gathered(POLICIES.parse(f"chunk_kv:base={base}"), one, budget), kept)


@pytest.mark.parametrize(("base", "press"), [("knorm", "KnormPress"), ("keydiff", "KeyDiffPress")])
@pytest.mark.parametrize("budget", [7, 64, 300, 600])
def test_entropy_chunk_kv(layers: list[Recorded], presses: Any, base: str, press: str, budget: int) -> None:
    for one in layers:
        made = presses.EntropyGatedChunkKVPress(getattr(presses, press)())
        kept = compressed(made, one, 1 - (budget + 0.5) / TOKENS)
        assert torch.equal(gathered(POLICIES.parse(f"entropy_chunk_kv:base={base}"), one, budget), kept)
