"""Jacap: values that matter where attention is undecided, and that no other value replaces."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.quadratic import quadratic, weighted_gram
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("jacap", source="arXiv:2609.08131")
@dataclass(frozen=True)
class Jacap(Policy):
    """Ranks tokens by the leverage of W_O v, weighted by how much attention to them reacts to queries.

    mu, L: mean and second moment of the chunk's queries, as rotated. a = softmax(K mu / (tau sqrt(D)));
    w_i = (a_i (1 - a_i))^2 k_i^T L k_i / D; u_i = W_O^h v_i; M = I + sum_i w_i u_i u_i^T; score = mean
    over the group of w_i u_i^T M^-1 u_i.
    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2609.08131, its formulas; no code was found.
    Differs: ours, where the paper leaves it open: queries with their rotation, tau 1, the mean over the
    group, and no pins, though w is near 0 where attention is near 1, as on a sink: protect sinks with
    `--pins 4,0`. M is dim x dim, from the Gram matrix of W_O^h, and inverted in float64. In chunked runs
    mu and L are the newest chunk's.
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.WINDOW_QUERIES, Need.OUTPUT_WEIGHTS})
    ranking = "by descending weighted leverage of W_O v"
    repeated = "kept and new tokens are ranked again, by the queries of the newest chunk"
    exactness = "paper"
    color = "#9467BD"

    tau: float = param(1.0, "ours; the paper's value is unknown")
    output: bool = param(True, "the paper; False takes v for W_O v")

    def __post_init__(self) -> None:
        if not 0 < self.tau < float("inf"):
            raise BadInput(f"jacap: tau={self.tau}; use a number above 0")

    def score(self, seen: Observation) -> torch.Tensor:
        queries, factor = seen.window_queries(seen.new).float(), seen.scaling
        mean = seen.by_group(queries.mean(2))
        second = queries.transpose(-1, -2) @ queries / queries.shape[2]
        attention = (factor / self.tau * mean @ seen.keys.float().transpose(-1, -2)).softmax(-1).flatten(1, 2)
        reacts = (attention * (1 - attention)).square()
        weights = reacts * quadratic(seen.keys, second).clamp_min(0) * factor**2
        capacity = weighted_gram(seen.values, weights).double()  # S, so that sum_i w_i u_i u_i^T = W S W^T
        unit = torch.eye(capacity.shape[-1], dtype=capacity.dtype, device=capacity.device)
        gram = seen.output_gram.double() if self.output else unit
        # u^T M^-1 u = v^T W^T (I + W S W^T)^-1 W v = v^T G (I + S G)^-1 v, with G = W^T W
        inner = gram @ torch.linalg.inv_ex(unit + capacity @ gram).inverse
        return seen.by_group(weights * quadratic(seen.values, inner)).mean(2)
