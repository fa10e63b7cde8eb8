"""CurDKV: the share of a token's key and value norms in its neighbourhood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput

TINY = 1e-30  # a block without any key or value has no shares


@register("cur", source="arXiv:2509.15038")
@dataclass(frozen=True)
class CUR(Policy):
    """Ranks tokens by approximate leverage scores: squared norms of key and value as shares of their block.

    k_i = ||key_i||^2 / sum of it over the block of i, v_i likewise; s_i = k_i * v_i, divided by its sum.

    Shapes: score (batch, kv_head, slot) float32, a share: sums to 1 over the slots.
    Source: arXiv:2509.15038; kvpress' CURPress, without its random projection.
    Differs: the first `sinks` tokens are pins. Within a block scores are shares, so every block keeps about
    as many tokens. Blocks are of slots: in chunked runs they move when tokens before them are evicted.
    """

    needs = frozenset({Need.KEYS, Need.VALUES})
    ranking = "by descending product of the shares of key and value norms"
    repeated = "shares are computed again over kept and new tokens"
    color = "#6B6ECF"
    exactness = "official code"
    parity = "kvpress"

    block: int = param(16, "kvpress")
    leverage: Literal["product", "keys", "values", "mean"] = param("product", "kvpress")
    sinks: int = param(4, "kvpress")

    def __post_init__(self) -> None:
        if self.block < 1 or self.sinks < 0:
            raise BadInput(
                f"cur: block={self.block}, sinks={self.sinks}; use block 1 or more, sinks 0 or more"
            )

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks)

    def score(self, seen: Observation) -> torch.Tensor:
        keys, values = (self._shares(x.float().square().sum(-1)) for x in (seen.keys, seen.values))
        joined = {"product": keys * values, "keys": keys, "values": values, "mean": (keys + values) / 2}
        found = joined[self.leverage]
        return found / found.sum(-1, keepdim=True).clamp(min=TINY)

    def _shares(self, norms: torch.Tensor) -> torch.Tensor:
        """Each token's part of its block's total: (batch, kv_head, slot)."""
        slots = norms.shape[-1]
        blocks = torch.nn.functional.pad(norms, (0, -slots % self.block)).unflatten(-1, (-1, self.block))
        shares = blocks / blocks.sum(-1, keepdim=True).clamp(min=TINY)
        return shares.flatten(-2)[..., :slots]
