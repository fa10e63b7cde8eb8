"""KVzap: what KVzip+ would say, predicted from each token's hidden state."""

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
from kvbench.errors import BadInput

WEIGHTS = Path(__file__).parent / "weights"
PARTS = ("inner", "inner_bias", "outer", "outer_bias")


@register("kvzap", source="arXiv:2601.07891")
@dataclass(frozen=True)
class KVzap(Calibrated):
    """Ranks tokens by a prediction of the logarithm of KVzip+'s score, from the attention's input.

    Linear: s = W x + b. MLP: s = W gelu(V x + c) + b. x: what the attention module receives for the token.

    weights: `ruler` (shipped, linear, for SmolLM2-135M-Instruct), or the path of a file that
    `kvbench train --policy kvzap` wrote (`--recipe mlp` for the MLP).
    Shapes: score (batch, kv_head, slot) float32, a logarithm.
    Source: arXiv:2601.07891; NVIDIA/kvpress `kvzap_press.py` and its `kvzap/` are the official code.
    Differs: trained on kvbench's traces; a ranking, where the method evicts all tokens below a threshold that
    are older than 128. A token's hidden state is gone after its chunk, so chunked runs are refused.
    """

    needs = frozenset({Need.HIDDEN_STATES})
    exactness = "official code"
    parity = "kvpress"
    ranking = "by descending predicted score"
    repeated = "not at all: kept tokens have no hidden state any more"
    chunked = False
    color = "#9E9AC8"
    trainer = "kvbench.policies.kvzap.command:TRAINER"

    weights: str = param("ruler", "ours: the linear form, trained on RULER-style traces, as kvp")

    _placed: ClassVar[Any] = ()  # (inner, inner_bias, outer, outer_bias) of each evicted layer, once bound

    @property
    def calibration(self) -> Calibration:
        return load_calibration(find_weights("kvzap", WEIGHTS, self.weights), "kvzap", PARTS)

    def bind(self, model: ModelDescription) -> KVzap:
        """With every layer's weights on the device of that layer."""
        tensors = self.calibration.tensors
        width = tensors["inner"].shape[2]
        if model.width not in (None, width):
            raise BadInput(
                f"{self.weights} of kvzap reads hidden states of size {width}, {model.name} has {model.width}"
            )
        return self.holding(
            _placed=tuple(
                tuple(tensors[name][layer].to(device) for name in PARTS)
                for layer, device in enumerate(model.devices)
            )
        )

    def score(self, seen: Observation) -> torch.Tensor:
        return predict(self._placed[seen.full_index], seen.hidden_states).transpose(1, 2).contiguous()


def predict(parts: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
    """(..., d_model) -> (..., kv_head). parts: as PARTS; without inner rows the map is linear."""
    inner, inner_bias, outer, outer_bias = parts
    x = x.float()
    if inner.shape[0]:
        x = torch.nn.functional.gelu(x @ inner.T + inner_bias)
    return x @ outer.T + outer_bias
