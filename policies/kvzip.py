"""KVzip: what the model looks at while it repeats the context."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.contract.second_pass import ContextText, Reading, SecondPass
from kvbench.errors import BadInput

WHOLE = "\n\nRepeat the previous context exactly."
PART = "\n\nRepeat the part of the previous context exactly, starting with"
BEFORE = 8  # tokens of the piece before, with which the request for a piece ends


@register("kvzip", source="arXiv:2505.23416")
@dataclass(frozen=True)
class KVzip(Policy):
    """Ranks tokens by the most attention that any token of a repetition of the context pays to them.

    The context is repeated in pieces: a request, the template's border, then the piece. The softmax runs over
    the sinks, the piece in the cache and, causally, the repetition; s_i = max over its tokens and over the
    group of A_i. plus: KVzip+, max of A_i ||W_O^h v_i||_2 / ||x_t||, x_t what the attention module received.

    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2505.23416; snu-mllab/KVzip `attention/score.py`; NVIDIA/kvpress `kvzip_press.py`.
    Differs: budgets are even over heads and layers (`kvzip` of the paper cuts all heads of the model by one
    threshold). Tokens of the chat template are sinks, as in the official code, and compete by the attention
    they get; the official code always keeps them, kvpress has the first 4 as sinks and evicts the others
    first. Softmax in float32 instead of the model's dtype.
    """

    exactness = "official code"
    parity = "kvpress"
    ranking = "by descending attention of the repetition"
    repeated = "all text read so far is repeated again, against what is kept"
    color = "#1B7837"

    chunk: int = param(2048, "kvpress; official 2000")
    sinks: int = param(4, "kvpress; the official code has the system prompt")
    plus: bool = param(False, "kvpress; KVzip+ comes from arXiv:2601.07891")

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.sinks < 0:
            raise BadInput(
                f"kvzip: chunk={self.chunk}, sinks={self.sinks}; use chunk 1 or more, sinks 0 or more"
            )

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        return frozenset({Need.SECOND_PASS, Need.OUTPUT_WEIGHTS} if self.plus else {Need.SECOND_PASS})

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks)

    def second_pass(self, text: ContextText) -> SecondPass:
        total = len(text.ids)
        first = text.prefix if text.prefix < total else 0
        readings = []
        for start in range(first, total, self.chunk):
            stop = min(start + self.chunk, total)
            before = text.encode(WHOLE)
            if start > first:
                before = text.encode(PART) + text.ids[max(first, start - BEFORE) : start]
            ids = before + text.suffix + text.ids[start:stop]
            readings.append(Reading(ids, start, stop, max(self.sinks, first)))
        return SecondPass(tuple(readings), "max", by_input_norm=self.plus)

    def score(self, seen: Observation) -> torch.Tensor:
        received = seen.second_attention
        if self.plus:
            received = received * seen.output_norms
        return seen.by_group(received).amax(2)
