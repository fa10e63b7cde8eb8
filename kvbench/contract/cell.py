"""One curve point of a study: a policy, how much it keeps, and under which rules.

The cell holds the policy itself and everything else that decides its numbers, from the plan to the row. A
new axis becomes a field here, with a default that stands for what there was before the axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .pins import Pins
from .spec import parameters_of, spec_of

if TYPE_CHECKING:
    from .policy import Policy

FULL = "full"  # the name of the cell without eviction


@dataclass(frozen=True)
class Schedule:
    """When the cache is cut: once after the context (prefill), or after every chunk of it (chunked).

    chunk: tokens, of the chunked schedule only. Raises ValueError for a chunk without its schedule.
    """

    kind: Literal["prefill", "chunked"] = "prefill"
    chunk: int | None = None

    def __post_init__(self) -> None:
        if (self.kind == "chunked") != (self.chunk is not None) or (self.chunk or 1) < 1:
            raise ValueError(f"schedule {self.kind} with a chunk of {self.chunk}")


PREFILL = Schedule()


class Ranker(NamedTuple):
    """A policy under pins: what makes a ranking. Budgets are cut from it later."""

    policy: Policy
    pins: Pins


@dataclass(frozen=True)
class Cell:
    """One curve point: what is evicted, how much stays, and under which rules.

    policy: who ranks, or None for no eviction. budget: KV pairs per KV head and layer, None without a policy.
    pins: resolved numbers. Raises ValueError for a policy without a budget, or a budget without a policy.
    """

    policy: Policy | None
    budget: int | None
    pins: Pins = Pins()  # noqa: RUF009 (frozen)
    schedule: Schedule = PREFILL

    def __post_init__(self) -> None:
        if (self.policy is None) != (self.budget is None):
            raise ValueError(f"policy {self.policy} with budget {self.budget}: a cell has both or neither")

    @property
    def name(self) -> str:
        """The policy's name, or "full"."""
        return FULL if self.policy is None else self.policy.name

    @property
    def spec(self) -> str:
        """The policy's canonical spec, or "full"."""
        return FULL if self.policy is None else spec_of(self.policy)

    @property
    def ranker(self) -> Ranker:
        """What makes the ranking that this cell is cut from. Raises ValueError without a policy."""
        if self.policy is None:
            raise ValueError("a cell without eviction has no ranking")
        return Ranker(self.policy, self.pins)

    def held(self, tokens: int) -> int:
        """KV pairs per KV head that stay of so many tokens."""
        return tokens if self.budget is None else min(self.budget, tokens)

    def as_dict(self) -> dict[str, Any]:
        """The cell's part of a row."""
        return {
            "policy": self.name,
            "params": {} if self.policy is None else parameters_of(self.policy),
            "budget": self.budget,
            "pins": [self.pins.first, self.pins.last],
            "schedule": self.schedule.kind,
            "chunk": self.schedule.chunk,
        }
