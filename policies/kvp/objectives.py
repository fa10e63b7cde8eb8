"""What KVP's agents are trained on: the paper's RLOO objective, its ablations, and a direct surrogate.

Every objective maps scores s (agent, token) and utilities u (agent, token) to one loss per agent.
C_w(sigma) = sum_r u_(sigma_r) W(r), with W(r) = sum of the weights of the budgets below r, is the cost of
a ranking; uniform budget weights give W(r) = r, the paper's C (arXiv:2602.10238, eq. 3.7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.errors import BadInput, UnknownName

PAIRS = 64  # comparisons per token of the pairwise objectives
AGENTS = 8  # agents whose (token, token) matrix is in memory at once


@dataclass(frozen=True)
class BudgetWeighting:
    """How much each budget counts in the reward: uniform (the paper), log (weight 1/(b+1)), or
    truncated:B (budgets below B only)."""

    kind: str = "uniform"
    limit: int = 0

    @classmethod
    def parse(cls, text: str) -> BudgetWeighting:
        name, _, limit = text.partition(":")
        if name == "truncated" and limit.isdigit() and int(limit) > 0:
            return cls(name, int(limit))
        if text in ("uniform", "log"):
            return cls(text)
        raise BadInput(f"budget weighting '{text}': write uniform, log, or truncated:B as in truncated:128")

    def of_rank(self, rank: Tensor) -> Tensor:
        """W at ranks from 1 on; real-valued ranks are interpolated."""
        if self.kind == "log":
            return torch.log(rank + 0.5) + 0.5772156649  # the harmonic number, within 2%
        return rank.clamp(max=self.limit) if self.kind == "truncated" else rank


def ranking_cost(order: Tensor, utility: Tensor, weighting: BudgetWeighting) -> Tensor:
    """C_w of rankings. order: (..., agent, token); utility: (agent, token). Returns (..., agent)."""
    rank = torch.arange(1, order.shape[-1] + 1, device=order.device, dtype=utility.dtype)
    return (utility.expand(order.shape).gather(-1, order) * weighting.of_rank(rank)).sum(-1)


def plackett_luce(scores: Tensor, order: Tensor) -> Tensor:
    """log pi(sigma) of permutations: sum_i [f_(sigma_i) - logsumexp_(j >= i) f_(sigma_j)].

    scores: (agent, token) float32; order: (..., agent, token). Returns (..., agent). The inner sums are
    one reverse logcumsumexp, stable at any length.
    """
    ordered = scores.expand(order.shape).gather(-1, order)
    tails = torch.logcumsumexp(ordered.flip(-1), -1).flip(-1)
    return (ordered - tails).sum(-1)


def gumbel_orders(
    scores: Tensor, count: int, generator: torch.Generator, agents: range | None = None, total: int = 0
) -> Tensor:
    """`count` exact draws from Plackett-Luce: argsort of scores + Gumbel noise. (count, agent, token).

    agents, total: which of how many agents these are; an agent's draws are the same with or without the
    others. None: these are all.
    """
    drawn = range(scores.shape[0]) if agents is None else agents
    uniform = torch.rand((count, total or len(drawn), scores.shape[1]), generator=generator)
    uniform = uniform[:, drawn.start : drawn.stop].to(scores.device)
    noise = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
    return (scores.detach() + noise).argsort(-1, descending=True)


@dataclass(frozen=True)
class Step:
    """One step's inputs beside the scores. samples: permutations per agent (K of the paper).

    agents, total: see `gumbel_orders`.
    """

    utility: Tensor
    weighting: BudgetWeighting
    samples: int
    generator: torch.Generator
    agents: range | None = None
    total: int = 0


def rl(scores: Tensor, step: Step) -> Tensor:
    """RLOO: reward -C_w(sigma)/C_w(sigma*), leave-one-out baseline, normalised advantages."""
    order = gumbel_orders(scores, step.samples, step.generator, step.agents, step.total)
    reward = -ranking_cost(order, step.utility, step.weighting) / _best(step)
    advantage = leave_one_out(reward)
    advantage = (advantage - advantage.mean(0)) / (advantage.std(0) + 1e-8)
    return -(advantage * plackett_luce(scores, order)).mean(0)


def leave_one_out(reward: Tensor) -> Tensor:
    """R_k minus the mean of the other rewards. reward: (sample, agent)."""
    count = reward.shape[0]
    return reward - (reward.sum(0, keepdim=True) - reward) / (count - 1)


def _best(step: Step) -> Tensor:
    """C_w of the best ranking, (agent,); 1 where all utility is 0."""
    best = ranking_cost(step.utility.argsort(-1, descending=True), step.utility, step.weighting)
    return torch.where(best > 0, best, 1.0)


class _ExpectedRank(torch.autograd.Function):
    """sum_j sigmoid(s_j - s_i) without keeping the (token, token) matrix: the backward makes it again.

    The derivative sigmoid' is symmetric in i and j, so for an incoming gradient g the gradient of s is
    P g - g * (P 1) with P_ij = sigmoid'(s_i - s_j).
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        parts = [torch.sigmoid(s[:, None, :] - s[:, :, None]).sum(-1) for s in scores.split(AGENTS)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        parts = []
        for s, g in zip(ctx.saved_tensors[0].split(AGENTS), gradients[0].split(AGENTS), strict=True):
            sigmoid = torch.sigmoid(s[:, None, :] - s[:, :, None])
            slope = sigmoid.mul_(1 - sigmoid)
            both = torch.matmul(slope, torch.stack([g, torch.ones_like(g)], -1))  # P g and P 1
            parts.append(both[..., 0] - g * both[..., 1])
        return torch.cat(parts)


def expected_rank(scores: Tensor) -> Tensor:
    """E[rank] under Plackett-Luce, exactly: 1 + sum_(j != i) sigmoid(s_j - s_i). (agent, token)."""
    return _ExpectedRank.apply(scores) + 0.5  # the sum has sigmoid(0) = 0.5 for j = i; ranks start at 1


def softcost(scores: Tensor, step: Step) -> Tensor:
    """The cost itself, at expected ranks: sum_i u_i W(E[rank_i]) / C_w(sigma*).

    With uniform budgets this is the exact expectation that `rl` samples, because pairwise marginals of
    Plackett-Luce are logistic; with other weightings W moves inside the expectation (an approximation).
    """
    return (step.utility * step.weighting.of_rank(expected_rank(scores))).sum(-1) / _best(step)


def regression(scores: Tensor, step: Step) -> Tensor:
    """Pointwise: mean squared error against utility, standardised per agent."""
    u = step.utility
    target = (u - u.mean(-1, keepdim=True)) / (u.std(-1, keepdim=True, correction=0) + 1e-8)
    return (scores - target).square().mean(-1)


def ranknet(scores: Tensor, step: Step) -> Tensor:
    """Pairwise logistic loss on random pairs (Burges et al. 2005)."""
    other = torch.randint(scores.shape[-1], (PAIRS, scores.shape[-1]), generator=step.generator)
    other = other.to(scores.device)
    sign = torch.sign(step.utility[:, None] - step.utility[:, other])  # (agent, pair, token)
    margin = scores[:, None] - scores[:, other]
    return (torch.nn.functional.softplus(-sign * margin) * sign.abs()).mean((-1, -2))


def listnet(scores: Tensor, step: Step) -> Tensor:
    """Listwise: cross-entropy of softmax(scores) against utility as a distribution (Cao et al. 2007)."""
    target = step.utility / step.utility.sum(-1, keepdim=True).clamp(min=1e-20)
    return -(target * scores.log_softmax(-1)).sum(-1)


def softsort(scores: Tensor, step: Step) -> Tensor:
    """Squared error of soft ranks, divided by the length."""
    return _rank_error(scores, step).square().mean(-1)


def weighted_softsort(scores: Tensor, step: Step) -> Tensor:
    """The same, each token weighted by its utility."""
    weight = step.utility / step.utility.sum(-1, keepdim=True).clamp(min=1e-20)
    return (weight * _rank_error(scores, step).square()).sum(-1)


def _rank_error(scores: Tensor, step: Step) -> Tensor:
    """Soft rank minus true rank, as a share of the length. (agent, token)."""
    true = step.utility.argsort(-1, descending=True).argsort(-1) + 1
    return (expected_rank(scores) - true) / scores.shape[-1]


OBJECTIVES: dict[str, Callable[[Tensor, Step], Tensor]] = {
    "rl": rl,
    "softcost": softcost,
    "regression": regression,
    "ranknet": ranknet,
    "listnet": listnet,
    "softsort": softsort,
    "weighted_softsort": weighted_softsort,
}


def objective(name: str) -> Callable[[Tensor, Step], Tensor]:
    """Look an objective up. Raises UnknownName."""
    if name not in OBJECTIVES:
        raise UnknownName("objective", name, OBJECTIVES)
    return OBJECTIVES[name]
