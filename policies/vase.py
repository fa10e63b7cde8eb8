"""VaSE: tokens with outstanding values, then a sample in proportion to attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput
from kvbench.policies.orders import gumbel, places
from kvbench.policies.window import older_logits, under_window

TINY = 1e-30  # the least weight of a token in the sample


@register("vase", source="arXiv:2606.03928")
@dataclass(frozen=True)
class VaSE(Policy):
    """Ranks tokens by the range of their value, as far as the first `large`, and draws the others.

    r_i = max over channels of v_i - min over channels of v_i, infinite for the sinks: the `large` largest
    come first. The others follow by log a_i + Gumbel noise, which samples without replacement in
    proportion to a_i: attention of the last `window` queries to the older slots alone, mean over them and
    the group, averaged over `kernel` slots.

    Shapes: score (batch, kv_head, slot) float32, the slot's place in this order, from the worst up.
    Source: arXiv:2606.03928; terarachang/VaSE `cache_utils.py`, mode `range_sink_sample_attn` with
    smoothing.
    Differs: the method evicts every 64 generated tokens, this is its form after the prompt. A token's
    draw stays with it, the official code draws anew each time. `large` is a number, so budgets below
    sinks + window + large are ranked by range alone (official: 1024 at budgets of 2048 to 8192).
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.WINDOW_QUERIES, Need.RANDOM})
    exactness = "official code"
    ranking = "the sinks, the window by recency, the largest ranges, then a sample by attention"
    repeated = "kept and new tokens are ranked by the last queries of the newest chunk, with their first draw"
    color = "#F97B72"

    large: int = param(200, "official class default n_large; its scripts use 1024")
    window: int = param(64, "official residual_length")
    sinks: int = param(4, "official code")
    kernel: int = param(5, "official code, smooth")

    def __post_init__(self) -> None:
        if min(self.large, self.sinks) < 0 or min(self.window, self.kernel) < 1 or self.kernel % 2 == 0:
            raise BadInput(
                f"vase: large={self.large}, window={self.window}, sinks={self.sinks}, kernel={self.kernel}; "
                "use large and sinks of 0 or more, window 1 or more, kernel odd"
            )

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks, last=self.window)

    def score(self, seen: Observation) -> torch.Tensor:
        older = max(seen.slots - self.window, 0)
        noise = gumbel(seen.uniform()[..., :older])
        if not older:
            return under_window(noise, seen)
        attention = older_logits(seen, self.window, older).softmax(-1).mean((2, 3))
        weight = torch.nn.functional.avg_pool1d(attention, self.kernel, stride=1, padding=self.kernel // 2)
        low, high = seen.values[:, :, :older].float().aminmax(dim=-1)
        span = places((high - low).masked_fill(seen.positions[..., :older] < self.sinks, float("inf")))
        drawn = places(weight.clamp_min(TINY).log() + noise)
        return under_window(torch.where(span >= older - self.large, older + span, drawn), seen)
