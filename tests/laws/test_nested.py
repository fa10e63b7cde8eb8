"""Law 4: a larger budget keeps all that a smaller one keeps, and no score knows the budget."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.contract.cell import Cell
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.engine.bind import bind_policies
from kvbench.engine.cache import Cache
from kvbench.engine.observe import Moment
from kvbench.engine.passes import rank_stored, read_and_rank
from kvbench.engine.selection import evict
from tests.laws.lab import (
    SCHEDULES,
    SPECS,
    N,
    cell_of,
    cells_of,
    held,
    loaded,
    prompt_of,
    ranker_of,
    schedule_of,
    text_of,
    try_out,
    words,
)  # fmt: skip
from tests.tiny import DISTINCT, KV_HEADS, LAYERS

FIXED = ("random", "streaming_llm", "oracle")  # a token's score never changes, whatever was evicted


@torch.inference_mode()
def every_budget(arch: str, spec: str, pins: Pins | None = None) -> list[list[Tensor]]:
    """What is kept at budgets 1..N, per layer (kv_head, kept)."""
    lm, ranker = loaded(arch), ranker_of(spec, pins)
    cache = Cache.empty(LAYERS, N)
    draw = torch.Generator().manual_seed(0)
    future = {layer: torch.rand(1, KV_HEADS, N, generator=draw) for layer in range(LAYERS)}
    bound = bind_policies(lm, [ranker.policy])
    moment = Moment(N, N, 3, future, text=text_of(lm, words(N, 0)))
    rankings, _ = read_and_rank(bound, cache, torch.tensor(words(N, 0)), [[ranker]], moment)
    cells = [cell_of(ranker, budget) for budget in range(1, N + 1)]
    compacted, rows = evict(lm, cache, cells, [0] * N, rankings, 0)
    return [held(compacted, row) for row in rows]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("arch", DISTINCT)
def test_all_budgets_nest(arch: str, spec: str) -> None:
    for pins in (None, Pins(4, 16)) if arch == "llama" else (None,):
        kept = every_budget(arch, spec, pins)
        has = torch.zeros(N, LAYERS, KV_HEADS, N, dtype=torch.bool)  # budget, layer, KV head, position
        for index, layers in enumerate(kept):
            for layer, positions in enumerate(layers):
                has[index, layer].scatter_(1, positions, True)
        assert not (has[:-1] & ~has[1:]).any()
        for layer in loaded(arch).geometry.full_layers:
            assert [positions[layer].shape[1] for positions in kept] == list(range(1, N + 1))


@pytest.mark.parametrize("spec", FIXED)
def test_fixed_scores_nest_in_chunks(spec: str) -> None:
    """Where scores are fixed, evicting after every chunk keeps what evicting once keeps."""
    once = try_out(loaded("llama"), prompt_of(), cells_of((spec,), (7, 8, 20, 21)))
    often = try_out(loaded("llama"), prompt_of(), cells_of((spec,), (7, 8, 20, 21), "chunked"))
    for a, b in zip(once.cells, often.cells, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(once.kept(a), often.kept(b), strict=True))


@dataclass(frozen=True)
class Spy(Policy):
    """K-Norm that remembers all it was shown."""

    needs = frozenset({Need.KEYS})
    shown: list[dict[str, Any]] = field(default_factory=list, compare=False)

    def score(self, seen: Observation) -> Tensor:
        facts = {key: value for key, value in vars(seen).items() if not key.startswith("_")}
        self.shown.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in facts.items()})
        return -seen.keys.float().norm(dim=-1)


@pytest.mark.parametrize("budget", [1, 20, 69, 500])
def test_a_score_never_sees_the_budget(budget: int) -> None:
    """All that a policy is shown before the first eviction is the same at every budget."""
    for schedule in SCHEDULES:
        shown = []
        for asked in (33, budget):
            spy = Spy()
            try_out(loaded("llama"), prompt_of(), [Cell(spy, asked, Pins(), schedule_of(schedule))])
            shown.append(spy.shown[:LAYERS])
        for one, other in zip(*shown, strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
                assert same, name


def test_one_score_for_all_budgets() -> None:
    spy = Spy()
    try_out(loaded("llama"), prompt_of(), [Cell(spy, budget) for budget in (1, 5, 20, 69)])
    assert len(spy.shown) == LAYERS


def test_the_contract_has_no_place_for_a_budget() -> None:
    """Nor may a policy make one: `kvbench check` looks at its parameters and its code."""
    assert list(inspect.signature(Policy.score).parameters) == ["self", "seen"]
    assert not any("budget" in part.name for part in dataclasses.fields(Observation))


@torch.inference_mode()
def test_ranking_late_is_ranking() -> None:
    """A ranking made after the prefill from stored keys is the one made during it."""
    lm, ranker = loaded("llama"), ranker_of("knorm")
    cache = Cache.empty(LAYERS, N)
    bound, moment = bind_policies(lm, [ranker.policy]), Moment(N, N, 3)
    early, _ = read_and_rank(bound, cache, torch.tensor(words(N, 0)), [[ranker]], moment)
    late = rank_stored(bound, cache, [[ranker]], moment, dict.fromkeys(range(LAYERS), 1.0))
    for name in ("order", "score"):
        one, other = (getattr(rankings.found[0, ranker], name) for rankings in (early, late))
        assert one.shape == (LAYERS, KV_HEADS, N)
        assert torch.equal(one, other)
