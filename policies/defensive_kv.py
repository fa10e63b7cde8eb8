"""DefensiveKV: the most attention that any query of the window pays, not what they pay on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput
from kvbench.policies.orders import places, shares
from kvbench.policies.window import under_window


@register("defensive_kv", source="arXiv:2510.13334")
@dataclass(frozen=True)
class DefensiveKV(Policy):
    """Ranks the most attended tokens first, then tokens by the worst case over the window, times value norms.

    a = attention of the window to the older slots, u = a averaged over `kernel` slots, each row rescaled
    to its mass; d_i = max over the group and the window of u_i; s_i = max(d_i, mean d) m_i, m_i =
    ||v_i||_1 as a share over KV heads. First come the tokens whose mean attention sums to less than
    `mass`, by that attention.

    Shapes: score (batch, kv_head, slot) float32, the slot's place in this order, from the worst up.
    Source: arXiv:2510.13334; FFY0/DefensiveKV `efficient_defensivekv_press.py`.
    Differs: ||v||_1 stands in for ||W_O v||_1, mean over the group (ours). All heads have one budget, the
    method gives them unequal ones. As in the code, `mass` is lowered by the attention to the last `window`
    older slots; the code orders the first tokens by nothing. The window stays above all others.
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.WINDOW_QUERIES})
    exactness = "official code"
    ranking = "the window by recency, the most attended by attention, then by descending worst case"
    repeated = "kept and new tokens are ranked by the last queries of the newest chunk"
    color = "#008695"

    window: int = param(32, "official window_size")
    kernel: int = param(5, "official kernel_size")
    mass: float = param(0.9, "official code; 0 ranks by the worst case alone")

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0 or not 0 <= self.mass <= 1:
            given = f"window={self.window}, kernel={self.kernel}, mass={self.mass}"
            raise BadInput(f"defensive_kv: {given}; use window >= 1, an odd kernel, mass from 0 to 1")

    @property
    def pins(self) -> Pins:
        return Pins(last=self.window)

    def score(self, seen: Observation) -> torch.Tensor:
        older = max(seen.slots - self.window, 0)
        rows = seen.by_group(
            seen.window_attention(self.window)[..., :older]
        )  # (batch, kv_head, group, w, older)
        if not older:
            return under_window(rows[:, :, 0, 0], seen)
        size = seen.values[:, :, :older].float().abs().sum(-1)
        score = places(self._worst(rows) * shares(size, 1))
        mean = rows.mean((2, 3))
        return under_window(torch.where(self._first(mean), older + places(mean), score), seen)

    def _worst(self, rows: torch.Tensor) -> torch.Tensor:
        """(batch, kv_head, group, w, older) -> (batch, kv_head, older): the maximum, at least its mean."""
        flat = rows.flatten(0, 2)
        smooth = torch.nn.functional.avg_pool1d(flat, self.kernel, stride=1, padding=self.kernel // 2)
        top = (shares(smooth) * flat.sum(-1, keepdim=True)).view_as(rows).amax((2, 3))
        return top.maximum(top.mean(-1, keepdim=True))

    def _first(self, mean: torch.Tensor) -> torch.Tensor:
        """Where the largest shares of (batch, kv_head, older) sum to less than the mass."""
        near = mean[..., -self.window :].sum(-1, keepdim=True).mean(1, keepdim=True)
        share = shares(mean)
        best = share.argsort(dim=-1, descending=True, stable=True)
        below = share.gather(-1, best).cumsum(-1) < self.mass - near
        return torch.zeros_like(below).scatter(-1, best, below)
