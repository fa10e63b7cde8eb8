"""The contract of a policy that ranks by the scores of another one.

`chunk_kv:base=snapkv`, or with parameters of the base, in brackets: `chunk_kv:base=(tova:group=max)`.
A subclass changes the base's scores; what the base reads, pins, has learned and fits is the wrapper's, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import BadInput
from .model_description import ModelDescription
from .need import Need
from .pins import Pins
from .policy import Policy, TrainedFor, param
from .registry import POLICIES
from .spec import spec_of, split_name

if TYPE_CHECKING:
    from torch import Tensor

    from .observation import Observation
    from .second_pass import ContextText, SecondPass
    from .seen_text import SeenText


@dataclass(frozen=True)
class Wrapper(Policy):
    """Base of policies that wrap another one.

    base: a policy, with its parameters. own: what the wrapper itself reads, beside what the base reads.
    Raises: UnknownName for a base that is not there; BadInput for one that wraps this policy again.
    """

    own: ClassVar[frozenset[Need]] = frozenset()

    base: str = param("snapkv", "ours; the method takes any policy")

    def __post_init__(self) -> None:
        if split_name(self.base)[0] == self.name:
            raise BadInput(f"{self.name}:base={self.base}: a policy cannot wrap itself")
        inner = POLICIES.parse(self.base)
        outer = inner
        while isinstance(outer, Wrapper):
            if outer.name == self.name:
                raise BadInput(f"{self.name}:base={self.base}: it wraps itself again inside {inner.name}")
            outer = outer.inner
        object.__setattr__(self, "base", spec_of(inner))  # one spelling of one thing

    @cached_property
    def inner(self) -> Policy:
        """The policy that is wrapped."""
        found: Policy = POLICIES.parse(self.base)
        return found

    def base_score(self, seen: Observation) -> Tensor:
        """What the base gives: (batch, kv_head, slot) float32, higher is kept longer."""
        return self.inner.score(seen.limited_to(self.inner.needs & seen.needs))

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        return self.inner.needs | self.own

    @property
    def chunked(self) -> bool:  # type: ignore[override]
        return self.inner.chunked

    @property
    def pins(self) -> Pins:
        return self.inner.pins

    @property
    def trained_for(self) -> TrainedFor | None:
        return self.inner.trained_for

    @property
    def probe(self) -> Tensor | None:
        return self.inner.probe

    def second_pass(self, text: ContextText) -> SecondPass:
        return self.inner.second_pass(text)

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def seen_text(self) -> SeenText | None:
        return self.inner.seen_text

    @property
    def card(self) -> Mapping[str, Any]:
        return self.inner.card

    def bind(self, model: ModelDescription) -> Policy:
        """With the base bound, too."""
        bound = self.inner.bind(model)
        return self if bound is self.inner else self.holding(inner=bound)
