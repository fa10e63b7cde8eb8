"""R-KV: tokens that the last queries attend to and that no newer token resembles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.attention_sums import BLOCK
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput
from kvbench.policies.window import older_logits, under_window


@register("r_kv", source="arXiv:2505.24133")
@dataclass(frozen=True)
class RKV(Policy):
    """Ranks tokens by the window's attention, less how much other keys resemble their key.

    s_i = weight I_i - (1 - weight) R_i. I: per query of the window the largest logit of the group,
    softmax over the older slots only, mean over the window, maximum over `kernel` slots. R = softmax_j of
    mean_i C_ij, with C_ij = cos(k_i, k_j), 0 for i = j and for the newest j with C_ij > `similar` (slot 0
    if there is none).

    Shapes: score (batch, kv_head, slot) float32, no unit; the window's lies above all others.
    Source: arXiv:2505.24133; Zefan-Cai/R-KV `r1_kv.py`, `utils.py`.
    Differs: the official code evicts after the prompt and again every 128 generated tokens; this is its
    form after the prompt. It compares the keys of the batch's first row only, each row is compared by
    itself here. Weight 0.1 is its README's, its class has 0.07. Similarities are summed in blocks of
    rows.
    """

    needs = frozenset({Need.KEYS, Need.WINDOW_QUERIES})
    exactness = "official code"
    ranking = "the window by recency, then by descending importance less redundancy"
    repeated = "kept and new tokens are compared, and ranked by the last queries of the newest chunk"
    color = "#CF1C90"

    window: int = param(8, "official code")
    weight: float = param(0.1, "official README; its class has 0.07")
    similar: float = param(0.5, "official code")
    kernel: int = param(7, "official code")

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0 or not 0 <= self.weight <= 1:
            raise BadInput(
                f"r_kv: window={self.window}, kernel={self.kernel}, weight={self.weight}; "
                "use window 1 or more, kernel odd, weight from 0 to 1"
            )

    @property
    def pins(self) -> Pins:
        return Pins(last=self.window)

    def score(self, seen: Observation) -> torch.Tensor:
        older = max(seen.slots - self.window, 0)
        redundancy = self._redundancy(seen.keys)[..., :older]
        if not older:
            return under_window(redundancy, seen)
        attention = older_logits(seen, self.window, older).amax(2).softmax(-1).mean(2)
        importance = torch.nn.functional.max_pool1d(
            attention, self.kernel, stride=1, padding=self.kernel // 2
        )
        return under_window(self.weight * importance - (1 - self.weight) * redundancy, seen)

    def _redundancy(self, keys: torch.Tensor) -> torch.Tensor:
        """(batch, kv_head, slot, dim) -> (batch, kv_head, slot), sums to 1."""
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        slot = torch.arange(keys.shape[2], device=keys.device)
        total = torch.zeros(keys.shape[:3], device=keys.device)
        for start in range(0, len(slot), BLOCK):
            own = slot[start : start + BLOCK, None]
            alike = (unit[:, :, start : start + BLOCK] @ unit.transpose(-1, -2)).masked_fill(slot == own, 0.0)
            newest = torch.where(alike > self.similar, slot, 0).amax(-1, keepdim=True)
            total = total + alike.scatter(-1, newest, 0.0).sum(2)
        return (total / len(slot)).softmax(-1)
