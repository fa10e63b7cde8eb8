"""Objectives of KVP against enumeration of all rankings, and what they do with extreme inputs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from kvbench.contract.eviction import eviction_cost
from kvbench.errors import BadInput, UnknownName
from kvbench.policies.kvp.objectives import (
    OBJECTIVES,
    BudgetWeighting,
    Step,
    expected_rank,
    gumbel_orders,
    leave_one_out,
    objective,
    plackett_luce,
    ranking_cost,
    rl,
    softcost,
)

U = torch.tensor([0.5, 0.1, 0.3, 0.1])
SCORES = torch.tensor([0.3, -0.4, 0.9, 0.1])
ORDERS = torch.tensor(list(itertools.permutations(range(4))))  # (24, 4)
UNIFORM = BudgetWeighting()


def weight_of(weighting: BudgetWeighting, budget: int) -> float:
    """The weight of one budget, as the options are documented."""
    if weighting.kind == "log":
        return 1 / (budget + 1)
    return float(weighting.kind == "uniform" or budget < weighting.limit)


def direct_probability(scores: Tensor, order: Tensor) -> float:
    """Plackett-Luce: the first token drawn with probability softmax, then the next of the others, ..."""
    weight, left, product = scores.double().exp(), list(range(len(scores))), 1.0
    for token in order.tolist():
        product *= float(weight[token] / weight[left].sum())
        left.remove(token)
    return product


def probabilities(scores: Tensor) -> Tensor:
    return torch.tensor([direct_probability(scores, order) for order in ORDERS], dtype=torch.float64)


def step_of(u: Tensor, samples: int = 4, seed: int = 0, weighting: BudgetWeighting = UNIFORM) -> Step:
    return Step(u, weighting, samples, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("order", "cost", "reward"),
    [((0, 2, 1, 3), 1.8, -1.0), ((0, 1, 2, 3), 2.0, -1.1111), ((3, 1, 2, 0), 3.2, -1.7778)],
)
def test_vectors_of_the_reference(order: tuple[int, ...], cost: float, reward: float) -> None:
    ranking = torch.tensor([order])
    assert ranking_cost(ranking, U[None], UNIFORM).item() == pytest.approx(cost)
    assert -eviction_cost(ranking[0], U).item() == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize("text", ["uniform", "truncated:3", "truncated:7", "truncated:100", "log"])
def test_weight_of_a_rank_is_the_sum_over_smaller_budgets(text: str) -> None:
    weighting = BudgetWeighting.parse(text)
    n = 60
    wanted = [sum(weight_of(weighting, b) for b in range(rank)) for rank in range(1, n + 1)]
    tolerance = 0.02 if text == "log" else 1e-6
    found = weighting.of_rank(torch.arange(1, n + 1).float())
    assert found.tolist() == pytest.approx(wanted, rel=tolerance)
    u = torch.rand(1, n, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))[None]
    by_rank = u.gather(1, order)[0]
    total = sum(weight_of(weighting, b) * by_rank[b:].sum().item() for b in range(n))
    assert ranking_cost(order, u, weighting).item() == pytest.approx(total, rel=max(tolerance, 1e-5))


@pytest.mark.parametrize("text", ["", "logs", "truncated", "truncated:", "truncated:0", "uniform:3"])
def test_other_budget_weightings_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="truncated:B"):
        BudgetWeighting.parse(text)


def test_plackett_luce_is_the_product_of_draws() -> None:
    found = plackett_luce(SCORES.expand(1, -1), ORDERS[:, None]).exp()[:, 0]
    wanted = probabilities(SCORES)
    assert torch.allclose(found.double(), wanted, rtol=1e-5)
    assert found.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("n", [3, 4])
def test_gumbel_sort_draws_from_plackett_luce(n: int) -> None:
    scores, draws = torch.tensor([1.0, -0.5, 0.3, 0.0])[:n], 20_000
    orders = gumbel_orders(scores[None], draws, torch.Generator().manual_seed(3))[:, 0]
    permutations = list(itertools.permutations(range(n)))
    counts = dict.fromkeys(permutations, 0)
    for order in orders.tolist():
        counts[tuple(order)] += 1
    expected = [draws * direct_probability(scores, torch.tensor(order)) for order in permutations]
    assert chisquare(list(counts.values()), expected).pvalue > 0.01
    flat = [draws / len(permutations)] * len(permutations)
    assert chisquare(list(counts.values()), flat).pvalue < 1e-6  # the draws are enough to tell


def test_agents_draw_independently() -> None:
    orders = gumbel_orders(torch.zeros(2, 30), 5, torch.Generator().manual_seed(0))
    assert len({tuple(order) for order in orders.flatten(0, 1).tolist()}) == 10
    assert orders.sort(-1).values.eq(torch.arange(30)).all()


@pytest.mark.parametrize("size", [1.0, 100.0, 10_000.0])
def test_long_contexts_and_large_scores_are_stable(size: float) -> None:
    n = 8192
    scores = size * torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    scores.requires_grad_()
    order = gumbel_orders(scores, 1, torch.Generator().manual_seed(1))[0]
    found = plackett_luce(scores, order)
    ordered = scores.detach().double().gather(-1, order)
    tails = ordered.flip(-1).logcumsumexp(-1).flip(-1)
    assert found.item() == pytest.approx((ordered - tails).sum().item(), rel=1e-5, abs=0.5)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    reverse = plackett_luce(scores.detach(), order.flip(-1))  # the least likely ranking
    assert reverse.isfinite().all()


def test_leave_one_out() -> None:
    reward = torch.tensor([[1.0, -3.0], [4.0, 2.0], [7.0, 0.0]])
    for k, agent in itertools.product(range(3), range(2)):
        others = [reward[other, agent].item() for other in range(3) if other != k]
        wanted = reward[k, agent].item() - sum(others) / 2
        assert leave_one_out(reward)[k, agent].item() == pytest.approx(wanted)


def exact_gradient(weighting: BudgetWeighting) -> Tensor:
    """Of the expected reward, all rankings enumerated, in float64."""
    scores = SCORES.double().requires_grad_()
    best = ranking_cost(U.argsort(descending=True)[None], U[None].double(), weighting)
    reward = -ranking_cost(ORDERS[:, None], U[None].double(), weighting) / best
    expected = (plackett_luce(scores[None], ORDERS[:, None]).exp() * reward).sum()
    expected.backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    return scores.grad


@pytest.mark.parametrize("text", ["uniform", "truncated:2"])
def test_rl_follows_the_exact_gradient(text: str) -> None:
    """Advantages are normalised, so only the direction is that of the expected reward."""
    weighting, repeats = BudgetWeighting.parse(text), 6000
    scores = SCORES.expand(repeats, -1).clone().requires_grad_()
    rl(scores, step_of(U.expand(repeats, -1), 8, weighting=weighting)).sum().backward()
    assert scores.grad is not None
    wanted = -exact_gradient(weighting)  # rl is a loss
    assert torch.cosine_similarity(scores.grad.double().mean(0), wanted, dim=0) > 0.99


def test_leave_one_out_estimates_the_exact_gradient() -> None:
    repeats, samples = 6000, 4
    u = U.expand(repeats, -1)
    scores = SCORES.expand(repeats, -1).clone().requires_grad_()
    order = gumbel_orders(scores, samples, torch.Generator().manual_seed(5))
    reward = -ranking_cost(order, u, UNIFORM) / 1.8
    (leave_one_out(reward) * plackett_luce(scores, order)).mean(0).sum().backward()
    assert scores.grad is not None
    wanted = exact_gradient(UNIFORM)
    error = scores.grad.std(0) / math.sqrt(repeats)
    assert ((scores.grad.mean(0) - wanted).abs() < 4 * error).all()
    assert (wanted.abs() > 10 * error).any()  # or the comparison would say nothing


def test_expected_rank_by_enumeration() -> None:
    chance = probabilities(SCORES)
    ranks = (ORDERS.argsort(-1) + 1).double()  # rank of each token in each ranking
    wanted = (chance[:, None] * ranks).sum(0)
    assert torch.allclose(expected_rank(SCORES[None])[0].double(), wanted, atol=1e-5)


def test_softcost_is_the_expected_cost() -> None:
    costs = eviction_cost(ORDERS, U.expand(24, -1)).double()
    wanted = (probabilities(SCORES) * costs).sum().item()
    assert softcost(SCORES[None], step_of(U[None])).item() == pytest.approx(wanted, rel=1e-5)


def test_softcost_of_a_sure_ranking_is_its_cost() -> None:
    """Where nothing is left to chance, W outside or inside the expectation is the same."""
    for text in ("uniform", "log", "truncated:2"):
        weighting = BudgetWeighting.parse(text)
        for order in ORDERS:
            scores = torch.empty(4).scatter(0, order, torch.tensor([300.0, 200.0, 100.0, 0.0]))
            best = ranking_cost(torch.tensor([[0, 2, 1, 3]]), U[None], weighting).item()
            wanted = ranking_cost(order[None], U[None], weighting).item() / best
            found = softcost(scores[None], step_of(U[None], weighting=weighting)).item()
            assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("agents", [1, 8, 11])
def test_backward_of_expected_rank(agents: int) -> None:
    """Agents are worked through in parts, so their number matters."""
    draw = torch.Generator().manual_seed(agents)
    scores = torch.randn(agents, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(expected_rank, scores)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["one token", "no attention", "equal", "far"])
def test_no_objective_gives_nan(name: str, kind: str) -> None:
    n = 1 if kind == "one token" else 40
    u = torch.rand(2, n, generator=torch.Generator().manual_seed(0))
    u = u * 0 if kind == "no attention" else torch.ones(2, n) if kind == "equal" else u
    scores = torch.randn(2, n, generator=torch.Generator().manual_seed(1))
    scores = (scores * (1e4 if kind == "far" else 1)).requires_grad_()
    loss = objective(name)(scores, step_of(u))
    assert loss.shape == (2,)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert loss.isfinite().all()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_of_agents_are_apart(name: str) -> None:
    """One agent's loss does not look at another agent."""
    draw = torch.Generator().manual_seed(2)
    u, scores = torch.rand(10, 12, generator=draw), torch.randn(10, 12, generator=draw)
    before = objective(name)(scores, step_of(u))
    u[3], scores[3] = u[3].flip(0) * 2, scores[3] * -3
    after = objective(name)(scores, step_of(u))
    others = [agent for agent in range(10) if agent != 3]
    assert torch.equal(before[others], after[others])
    assert before[3] != after[3]


def test_unknown_objective() -> None:
    with pytest.raises(UnknownName, match="softcost"):
        objective("softcosts")
