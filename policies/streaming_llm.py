"""StreamingLLM: the first tokens and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("streaming_llm", source="arXiv:2309.17453")
@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Ranks the sinks first, then every other token by recency.

    The sinks are the policy's pins, so `--pins none` leaves a plain sliding window, and a budget of
    at most `sinks` keeps the first `budget` positions.

    Shapes: score (batch, kv_head, slot) float32, the original position, in tokens.
    Source: arXiv:2309.17453, section 3.2; mit-han-lab/streaming-llm `kv_cache.py`.
    Differs: position mode "original". Kept keys keep the rotation of their original position, as in
    plain kvpress; the official code caches keys before rotation and renumbers them inside the cache
    at every step, which gives other logits. The official `recent_size` (512) is here
    budget - sinks. The official code makes room before new tokens enter, here room is made after a
    chunk was read. kvpress scores 1 or 0 depending on its ratio: same kept set, but no ranking.
    """

    exactness = "official code"
    parity = "kvpress"
    ranking = "sinks by ascending position, then all others by descending position"
    repeated = "the same tokens as in one go: position orders them, and sinks are never evicted"
    color = "#E69F00"

    sinks: int = param(4, "official start_size; kvpress n_sink")

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise BadInput(f"streaming_llm: sinks={self.sinks}, but it must be 0 or more; use 4 as the paper")

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks)

    def score(self, seen: Observation) -> torch.Tensor:
        return seen.positions.float()
