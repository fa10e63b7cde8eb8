"""JudgeQ: what learned soft tokens, read after the context, attend to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from kvbench.contract.model_description import ModelDescription
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, TrainedFor, param
from kvbench.contract.registry import register
from kvbench.contract.seen_text import SeenText
from kvbench.contract.weights import find_weights
from kvbench.errors import BadInput

from .checkpoint import SoftTokens, load

WEIGHTS = Path(__file__).parent / "weights"


@register("judgeq", source="arXiv:2509.10798")
@dataclass(frozen=True)
class JudgeQ(Policy):
    """Ranks tokens by the attention of n learned soft tokens that the model reads after the context.

    The soft tokens are n trained rows of input embeddings, everything else is the frozen model. They
    cost one extra forward of n tokens, counted in score_s, and leave nothing behind: their keys and
    values are dropped and no later position counts them.

    weights: `ruler` or `dialogue` (shipped, for SmolLM2-135M-Instruct), or the path of a file that
    `kvbench train --policy judgeq` wrote; with `--steps 0` it writes untrained tokens.
    group: how the query heads of a KV head are joined; `layer` joins all heads of the layer, as TOVA.
    pooling, kernel: smoothing over neighbouring slots, per query head, as SnapKV does. window: the last
    tokens that are always kept.

    The paper's choices: soft tokens after the prompt; their mean attention as score; input embeddings as
    the only parameters; mean squared error to the response's mean attention, over all layers and heads,
    as loss; 32 tokens. Ours, because we know the paper from its abstract and from notes only, and no code
    of it is public: the reduction over a group, pooling, the window (below); Adam, its learning rate,
    500 steps of one trace, the sum over the context in place of the mean, rows that begin as
    embeddings of real tokens (the recipe in the card); reading the soft tokens again after each chunk.

    Shapes: score (batch, kv_head, slot) float32, mean attention probability in [0, 1].
    Source: arXiv:2509.10798 (AAAI 2026).
    Differs: trained on the data of KVP, not on ShareGPT; when the question is withheld it belongs to
    the response whose attention is learned, not to the prompt.
    """

    needs = frozenset({Need.KEYS, Need.PROBE})
    exactness = "abstract"
    ranking = "by descending mean attention of the soft tokens; nothing is pinned"
    repeated = "the soft tokens are read again after each chunk, over kept and new tokens"
    color = "#117733"
    trainer = "kvbench.policies.judgeq.command:TRAINER"

    weights: str = param("ruler", "ours: trained on RULER-style traces, as kvp")
    group: Literal["mean", "max", "layer"] = param("mean", "ours: as snapkv; not known from the paper")
    pooling: Literal["none", "max", "avg"] = param("none", "ours; not known from the paper")
    kernel: int = param(7, "ours: as snapkv; unused without pooling")
    window: int = param(0, "ours: no window is kept; not known from the paper")

    _placed: ClassVar[Any] = None  # the soft tokens as a tensor, once bound

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0 or self.window < 0:
            raise BadInput(
                f"judgeq: kernel={self.kernel}, window={self.window}; use an odd kernel, window 0 or more"
            )

    @property
    def tokens(self) -> SoftTokens:
        return load(find_weights("judgeq", WEIGHTS, self.weights))

    @property
    def probe(self) -> torch.Tensor:
        return self.tokens.embeddings if self._placed is None else self._placed

    def bind(self, model: ModelDescription) -> JudgeQ:
        """With the soft tokens where the model's input embeddings lie, and in its dtype."""
        return self.holding(_placed=self.tokens.embeddings.to(model.device, model.dtype))

    @property
    def pins(self) -> Pins:
        return Pins(last=self.window)

    @property
    def trained_for(self) -> TrainedFor:
        return self.tokens.trained_for

    @property
    def identity(self) -> str:
        return self.tokens.identity

    @property
    def seen_text(self) -> SeenText | None:
        return self.tokens.seen

    @property
    def card(self) -> dict[str, Any]:
        return self.tokens.card

    def score(self, seen: Observation) -> torch.Tensor:
        received = self._pool(seen.probe_attention.mean(2))  # (batch, query_head, slot)
        if self.group == "layer":
            return received.mean(1, keepdim=True).expand(-1, seen.kv_heads, -1).contiguous()
        grouped = seen.by_group(received)
        return grouped.mean(2) if self.group == "mean" else grouped.amax(2)

    def _pool(self, x: torch.Tensor) -> torch.Tensor:
        if self.pooling == "none":
            return x
        pool = torch.nn.functional.max_pool1d if self.pooling == "max" else torch.nn.functional.avg_pool1d
        return pool(x, self.kernel, stride=1, padding=self.kernel // 2)
