"""Numbers behind the figures of heads and budgets, against loops, enumeration and scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kvbench.contract.eviction import eviction_cost
from kvbench.errors import BadInput
from kvbench.policies.kvp.figures import heads
from kvbench.policies.kvp.figures.recorded_costs import average_points, budget_edges

LAYERS, HEADS, SLOTS = 3, 2, 17


@pytest.fixture
def order() -> Tensor:
    return torch.rand(LAYERS, HEADS, SLOTS, generator=torch.Generator().manual_seed(1)).argsort(-1)


@pytest.fixture
def utility() -> Tensor:
    """A sharper distribution in every head than in the one before."""
    draw = torch.rand(LAYERS, HEADS, SLOTS, generator=torch.Generator().manual_seed(2))
    return draw ** torch.arange(1, 7).view(LAYERS, HEADS, 1)


def by_hand(order: Tensor) -> list[list[int]]:
    """The rank of each slot, from 1, head by head."""
    found = []
    for row in order.flatten(0, 1).tolist():
        found.append([row.index(slot) + 1 for slot in range(SLOTS)])
    return found


def test_ranks_invert_a_ranking(order: Tensor) -> None:
    assert heads.ranks(order).flatten(0, 1).tolist() == by_hand(order)


def test_spearman_is_scipys(order: Tensor) -> None:
    expected = stats.spearmanr(np.array(by_hand(order)).T).statistic
    assert heads.spearman(order).numpy() == pytest.approx(expected)
    assert heads.spearman(order).diagonal().tolist() == pytest.approx([1.0] * LAYERS * HEADS)
    assert expected.min() < 0 < expected[0, 1:].max()  # otherwise this shows little


def test_rank_moments_by_loops(order: Tensor) -> None:
    mean, variance = heads.rank_moments(order)
    rows = by_hand(order)
    for slot in range(SLOTS):
        places = [row[slot] for row in rows]
        middle = sum(places) / len(places)
        assert mean[slot].item() == pytest.approx(middle)
        assert variance[slot].item() == pytest.approx(sum((p - middle) ** 2 for p in places) / len(places))


def test_rank_error_by_loops(order: Tensor, utility: Tensor) -> None:
    error = heads.rank_error(order, utility)
    for layer, head in itertools.product(range(LAYERS), range(HEADS)):
        u, mine = utility[layer, head].tolist(), order[layer, head].tolist()
        for slot in range(SLOTS):
            best = 1 + sum(other > u[slot] for other in u)
            assert error[layer, head, slot].item() == pytest.approx(abs(mine.index(slot) + 1 - best) / SLOTS)
    assert (heads.rank_error(heads.oracle_order(utility), utility) == 0).all()


def test_budget_costs_are_the_papers_sum(order: Tensor, utility: Tensor) -> None:
    costs = heads.budget_costs(order, utility)
    for layer, head in itertools.product(range(LAYERS), range(HEADS)):
        u = utility[layer, head].tolist()
        best = sum((rank + 1) * value for rank, value in enumerate(sorted(u, reverse=True)))
        expected = [(b + 1) * u[slot] / best for b, slot in enumerate(order[layer, head].tolist())]
        assert costs[layer, head].tolist() == pytest.approx(expected, rel=1e-6)
        # the same as what each budget leaves behind, added up over all budgets
        left = sum(sum(u[slot] for slot in order[layer, head].tolist()[b:]) for b in range(SLOTS))
        assert costs[layer, head].sum().item() == pytest.approx(left / best)
    assert costs.sum(-1).float().numpy() == pytest.approx(eviction_cost(order, utility).numpy())
    nothing = heads.budget_costs(order, torch.zeros_like(utility))
    assert nothing.sum(-1).flatten().tolist() == pytest.approx([1.0] * LAYERS * HEADS)


def test_missed_masses_by_loops(order: Tensor, utility: Tensor) -> None:
    missed = heads.missed_masses(order, utility)
    u, mine = utility[1, 1].tolist(), order[1, 1].tolist()
    for b in range(SLOTS):
        expected = sum(u[slot] for slot in mine[b + 1 :]) / sum(u)
        assert missed[1, 1, b].item() == pytest.approx(expected, abs=1e-6)
    assert heads.missed_masses(order, torch.zeros_like(utility)).sum() == 0


def test_effective_tokens(utility: Tensor) -> None:
    even, one = torch.ones(1, 1, SLOTS), torch.eye(SLOTS)[None, :1]
    assert heads.effective_tokens(even).item() == pytest.approx(SLOTS)
    assert heads.effective_tokens(one).item() == pytest.approx(1)
    share = [value / sum(utility[0, 0].tolist()) for value in utility[0, 0].tolist()]
    entropy = -sum(p * math.log(p) for p in share)
    assert heads.effective_tokens(utility)[0, 0].item() == pytest.approx(math.exp(entropy))


def test_representative_heads_go_from_sharp_to_flat(utility: Tensor) -> None:
    effective = heads.effective_tokens(utility)
    chosen = heads.representative(utility, 3)
    values = [effective[place].item() for place in chosen]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (effective.min().item(), effective.max().item())
    assert sorted(heads.representative(utility, 8)) == list(itertools.product(range(LAYERS), range(HEADS)))


@pytest.mark.parametrize("longest", [1, 2, 9, 40, 700])
def test_points_cover_every_budget_once(longest: int) -> None:
    edges = budget_edges(longest)
    assert edges[0] == 1
    assert all(low < high for low, high in itertools.pairwise(edges))
    assert longest / 2**0.26 <= edges[-1] <= longest + 1 or longest < 4
    assert edges == budget_edges(2**20)[: len(edges)]  # points of short and long traces are the same budgets


def test_points_are_means_of_their_budgets() -> None:
    costs = np.random.default_rng(0).random((2, 3, 50))
    points = average_points(costs)
    edges = budget_edges(50)
    assert points.shape == (2, 3, len(edges) - 1)
    for point, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = [costs[1, 2, b - 1] for b in range(low, high)]
        assert points[1, 2, point] == pytest.approx(sum(inside) / len(inside))


def test_heads_by_name() -> None:
    assert heads.find_head("L2.H1", (LAYERS, HEADS)) == (2, 1)
    assert heads.head_name(2, 1) == "L2.H1"
    for text in ("L3.H0", "L0.H2", "0.0", "L-1.H0", "L0.H0 "):
        with pytest.raises(BadInput, match=r"write L0\.H0 to L2\.H1"):
            heads.find_head(text, (LAYERS, HEADS))
