"""The contract of a policy: it scores cached tokens, and does nothing else.

The engine owns pins, ties, ranking, budgets, gathering and positions. A score never
sees the budget, so one ranking serves every budget and the kept sets are nested.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .need import Need
from .pins import Pins

if TYPE_CHECKING:
    from torch import Tensor

    from .model_description import ModelDescription
    from .observation import Observation


@dataclass(frozen=True)
class TrainedFor:
    """The only model a learned policy fits: its evicted layers, KV heads, head size and fingerprint."""

    layers: int
    kv_heads: int
    head_dim: int
    sha256: str


def param(default: Any, source: str) -> Any:
    """A policy or task parameter: its default and where the default comes from."""
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies. Subclass as a frozen dataclass whose fields are the parameters.

    needs: signals that `score` reads from the Observation.
    pins: what the published method itself always keeps (`--pins native`).
    ranking: one sentence, how the published keep/evict rule became a full order.
    repeated: one sentence, what applying the policy again after each chunk means.
    bracket: "lower" or "upper" for policies that bound the others in a figure.
    color: matplotlib colour; without one, a colour is derived from the name.
    trainer: "module:function" behind `kvbench train --policy NAME`, for policies that learn.
    figures: "module:tuple" of the FigureKinds (kvbench/figures.py) that this policy adds to `kvbench figure`.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need]] = frozenset()
    ranking: ClassVar[str] = "by descending score"
    repeated: ClassVar[str] = "scores kept and new tokens again after each chunk"
    bracket: ClassVar[str | None] = None
    color: ClassVar[str | None] = None
    trainer: ClassVar[str | None] = None
    figures: ClassVar[str | None] = None

    @property
    def pins(self) -> Pins:
        return Pins()

    @property
    def trained_for(self) -> TrainedFor | None:
        """The model that learned weights fit, or None when the policy fits every model."""
        return None

    @property
    def probe(self) -> Tensor | None:
        """Extra tokens of a policy that declares PROBE: their input embeddings (n, d_model), floating point.

        The engine reads them after the context, shows their attention, and forgets them: they leave
        nothing in the cache, and no later position counts them. Beside PROBE, such a policy may only
        look at keys, values and random numbers.
        """
        return None

    @property
    def identity(self) -> str:
        """Fingerprint of what was learned: part of every row's identity, so retraining makes new rows."""
        return ""

    @property
    def card(self) -> Mapping[str, Any]:
        """How learned weights were made; empty for a policy that learns nothing."""
        return {}

    def bind(self, model: ModelDescription) -> Policy:
        """The policy, ready to rank for a model: called once per model, before anything is scored.

        A policy that learned returns `self.holding(...)` with its weights on the layers' devices, so that
        `score` and `probe` read no file and move nothing. What is returned must equal the policy itself.
        """
        return self

    def holding(self, **state: Any) -> Self:
        """A copy with attributes that are no parameters: it equals the original and has the same rows."""
        held = copy.copy(self)
        for name, value in state.items():
            object.__setattr__(held, name, value)
        return held

    @abstractmethod
    def score(self, seen: Observation) -> Tensor:
        """Score every slot of one layer, each row of the batch by itself.

        Returns (batch, kv_head, slot) float32; higher is kept longer; must be finite.
        """
