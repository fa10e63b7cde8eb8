"""The contract of a policy: it scores cached tokens and does nothing else.

The engine owns pins, ties, ranking, budgets, gathering and positions. A score never
sees the budget, so one ranking serves every budget and kept sets are nested.
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
    from .second_pass import ContextText, SecondPass
    from .seen_text import SeenText


@dataclass(frozen=True)
class TrainedFor:
    """The one model that learned weights fit: evicted layers, KV heads, head size, fingerprint."""

    layers: int
    kv_heads: int
    head_dim: int
    sha256: str


def param(default: Any, source: str) -> Any:
    """A parameter of a policy or task: its default, and the source of that default."""
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies. Subclass as a frozen dataclass whose fields are the parameters.

    needs: signals that `score` reads from the Observation.
    pins: tokens that the published method always keeps (`--pins native`).
    ranking: one sentence: how the published keep/evict rule becomes a total order.
    repeated: one sentence: what repeated application, after each chunk, means.
    exactness: what its definition is from: official code, paper, abstract or notes, or ours. parity: the
    implementation whose kept sets the tests compare, or none.
    chunked: False where it cannot rank tokens of earlier chunks: refused in the chunked schedule.
    bracket: "lower" or "upper" for reference policies that bound the others in figures.
    color: matplotlib colour; None derives one from the name.
    trainer: "module:function" behind `kvbench train --policy NAME`, for learned policies.
    figures: "module:tuple" of FigureKinds (kvbench.show.figures) to add to `kvbench figure`.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs: ClassVar[frozenset[Need]] = frozenset()
    ranking: ClassVar[str] = "by descending score"
    repeated: ClassVar[str] = "scores kept and new tokens again after each chunk"
    exactness: ClassVar[str] = "ours"
    parity: ClassVar[str] = "none"
    chunked: ClassVar[bool] = True
    bracket: ClassVar[str | None] = None
    color: ClassVar[str | None] = None
    trainer: ClassVar[str | None] = None
    figures: ClassVar[str | None] = None

    @property
    def pins(self) -> Pins:
        return Pins()

    @property
    def trained_for(self) -> TrainedFor | None:
        """The model that learned weights fit; None if the policy works with any model."""
        return None

    @property
    def probe(self) -> Tensor | None:
        """Input embeddings (n, d_model), floating point, of the extra tokens of a policy that needs PROBE.

        The engine reads them after the context, exposes their attention, and removes them: they leave
        nothing in the cache and do not shift later positions. Besides PROBE, such a policy may declare
        nothing that comes from the chunk's queries, hidden states or the future.
        """
        return None

    def second_pass(self, text: ContextText) -> SecondPass:
        """What a policy that needs SECOND_PASS wants read after the context.

        It may look at the result, keys, values and the output projection; not at what comes from the chunk's
        queries, hidden states or the future.
        """
        raise NotImplementedError("a policy that needs SECOND_PASS says what is read")

    @property
    def identity(self) -> str:
        """Fingerprint of the learned weights: part of a row's identity, so retraining gives new rows."""
        return ""

    @property
    def seen_text(self) -> SeenText | None:
        """The text that learned weights have seen, as their file says it; None where it does not."""
        return None

    @property
    def card(self) -> Mapping[str, Any]:
        """How the learned weights were made; empty for other policies."""
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

        Returns finite float32 of shape (batch, kv_head, slot); higher is kept longer.
        """
