"""VATP: attention weighted by the norm of what it would read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import param
from kvbench.contract.registry import register
from kvbench.contract.wrapper import Wrapper
from kvbench.errors import BadInput


@register("vatp", source="arXiv:2406.12335")
@dataclass(frozen=True)
class VATP(Wrapper):
    """Weighs the scores of a policy that reads attention by the norms of the values.

    s_i = base_i * ||v_i||_p. A token that is attended to but whose value is small changes no output.

    Shapes: score (batch, kv_head, slot) float32, the base's unit times that of the values.
    Source: arXiv:2406.12335; guozhiyu/vatp. Its base is H2O's accumulator, here that of the prefill.
    Differs: the paper also keeps the first 10 to 20 tokens, whose values are tiny (here: `--pins 20,0`). Any
    base whose scores are attention, from 0 on, can be weighed.
    """

    own = frozenset({Need.VALUES})
    ranking = "by descending product of the base's score and the norm of the value"
    repeated = "the base is applied again; norms of values never change"
    color = "#B5CF6B"
    exactness = "official code"

    base: str = param("observed_attention:mean=false", "the paper's, with H2O's accumulator")
    p: Literal[1, 2] = param(1, "official code: the L1 norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(need.is_attention for need in self.inner.needs):
            raise BadInput(
                f"vatp:base={self.base}: its scores are no attention; weigh a policy that reads it"
            )

    def score(self, seen: Observation) -> torch.Tensor:
        return self.base_score(seen) * seen.values.float().norm(p=self.p, dim=-1)
