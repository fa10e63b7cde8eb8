"""Q-Filters: keys that lie in the direction of the model's queries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvbench.contract.calibrated import Calibrated
from kvbench.contract.calibration import Calibration, load_calibration
from kvbench.contract.model_description import ModelDescription
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import param
from kvbench.contract.registry import register
from kvbench.contract.weights import find_weights

WEIGHTS = Path(__file__).parent / "weights"
FILTERS = "filters"


@register("q_filters", source="arXiv:2503.02812")
@dataclass(frozen=True)
class QFilters(Calibrated):
    """Ranks tokens by the projection of their key on one direction for each KV head, measured in advance.

    f_g = mean over the group of e v_1, the first right singular vector of the head's queries after RoPE, with
    the sign that most queries have along it; s_i = <f_g, k_i>.

    weights: `ruler` (shipped, for SmolLM2-135M-Instruct), or the path of a file that
    `kvbench train --policy q_filters` wrote.
    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2503.02812; NathanGodey/qfilters `make_filters.py`, `src/hf_cache.py`; NVIDIA/kvpress
    `qfilter_press.py`.
    Differs: filters come from kvbench's traces (the official ones from 20 sequences of 2048 tokens). The
    official cache keeps its last tokens outside the ranking, kvpress does not; nothing is pinned here.
    """

    needs = frozenset({Need.KEYS})
    exactness = "official code"
    parity = "kvpress"
    ranking = "by descending projection"
    repeated = "the same score for a token in every chunk"
    color = "#A55194"
    trainer = "kvbench.policies.q_filters.command:TRAINER"

    weights: str = param("ruler", "ours: measured on RULER-style traces, as kvp")

    _placed: ClassVar[Any] = ()  # filters of each evicted layer, once bound

    @property
    def calibration(self) -> Calibration:
        return load_calibration(find_weights("q_filters", WEIGHTS, self.weights), "q_filters", {FILTERS})

    def bind(self, model: ModelDescription) -> QFilters:
        """With every layer's filters, (kv_head, dim, 1), on the device of that layer."""
        layers = zip(self.calibration.tensors[FILTERS], model.devices, strict=True)
        return self.holding(_placed=tuple(one[..., None].to(device) for one, device in layers))

    def score(self, seen: Observation) -> torch.Tensor:
        return (seen.keys.float() @ self._placed[seen.full_index])[..., 0]
