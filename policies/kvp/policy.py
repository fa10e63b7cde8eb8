"""KVP: a learned score of each cached token, from its key, its value and its position alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvbench.contract.model_description import ModelDescription
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, TrainedFor, param
from kvbench.contract.registry import register
from kvbench.contract.seen_text import SeenText
from kvbench.contract.weights import file_state, find_weights
from kvbench.errors import BadInput

from .checkpoint import read_weights
from .scorer import ScorerShape, ScorerWeights, fast_scores, position_features

LoadedWeights = tuple[list[ScorerWeights], ScorerShape, dict[str, Any], SeenText | None]
WEIGHTS = Path(__file__).parent / "weights"


@register("kvp", source="arXiv:2602.10238")
@dataclass(frozen=True)
class KVP(Policy):
    """Ranks tokens by a small MLP per KV head, trained offline to predict future attention.

    weights: `ruler` or `dialogue` (shipped, for SmolLM2-135M-Instruct), or the path of a file that
    `kvbench train --policy kvp` wrote. Weights fit one model only.
    Shapes: score (batch, kv_head, slot) float32, unitless.
    Source: arXiv:2602.10238, sections 3.1 and A.2; first 4 and last 16 positions pinned as there.
    Differs: see the card of the weights for the recipe (`kvbench info kvp`).
    """

    needs = frozenset({Need.KEYS, Need.VALUES})
    exactness = "paper"
    ranking = "native: by descending score; the first 4 and last 16 tokens are pinned before it"
    repeated = "scores use original positions, so kept tokens score the same again"
    color = "#882255"
    trainer = "kvbench.policies.kvp.command:TRAINER"
    figures = "kvbench.policies.kvp.figures:FIGURES"

    weights: str = param("ruler", "trained on RULER-style traces, as the paper's KVP-R")

    _agents: ClassVar[tuple[ScorerWeights, ...]] = ()  # of each evicted layer, once bound
    _shape: ClassVar[ScorerShape | None] = None

    @property
    def pins(self) -> Pins:
        return Pins(first=4, last=16)

    @property
    def trained_for(self) -> TrainedFor:
        _, shape, card, _ = load(self.weights)
        return TrainedFor(shape.layers, shape.kv_heads, shape.dim, card["model_sha256"])

    @property
    def identity(self) -> str:
        return str(load(self.weights)[2]["identity"])

    @property
    def seen_text(self) -> SeenText | None:
        return load(self.weights)[3]

    @property
    def card(self) -> dict[str, Any]:
        return load(self.weights)[2]

    def bind(self, model: ModelDescription) -> KVP:
        """With every layer's agents on the device of that layer. Raises BadInput for another geometry."""
        agents, shape, *_ = load(self.weights)
        given = (len(model.devices), model.kv_heads, model.head_dim)
        fitting = (shape.layers, shape.kv_heads, shape.dim)
        if given != fitting:
            raise BadInput(
                f"its weights are for (layers, KV heads, head size) {fitting}, {model.name} has {given}"
            )
        placed = tuple(one.to(device) for one, device in zip(agents, model.devices, strict=True))
        return self.holding(_agents=placed, _shape=shape)

    def score(self, seen: Observation) -> torch.Tensor:
        if self._shape is None:
            raise BadInput("kvp scores for one model: call bind(model) first, as the engine does")
        features = position_features(seen.positions, self._shape.position)
        return fast_scores(self._agents[seen.full_index], seen.keys, seen.values, features)


def load(weights: str) -> LoadedWeights:
    """Per-layer agents ready for inference, their shape, their card, and the text they have seen.

    A file is read once, and again when it has changed. Raises BadInput for what is no weights file.
    """
    path = find_weights("kvp", WEIGHTS, weights)
    return _read(path, file_state(path))


@lru_cache(maxsize=32)
def _read(path: Path, state: tuple[int, ...]) -> LoadedWeights:
    stacked, shape, card, seen = read_weights(path)
    folded = stacked.folded()
    agents = [folded.agents_of(layer, shape.kv_heads) for layer in range(shape.layers)]
    digest = hashlib.sha256(repr(shape).encode())  # of the numbers: equal weights may lie in unequal files
    for name, tensor in sorted(stacked.tensors().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return agents, shape, {**card, "identity": digest.hexdigest()[:16]}, seen
