"""Leverage: keys that few others span, before their rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.draws import draw_key
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("leverage", source="arXiv:2507.08143")
@dataclass(frozen=True)
class Leverage(Policy):
    """Ranks tokens by the statistical leverage of their keys before RoPE, seen through a random sketch.

    X: the head's keys minus their mean over the slots, times a Gaussian (dim, sketch) / sqrt(sketch);
    score = x_i (X^T X + 0.01 I)^-1 x_i^T.
    Shapes: score (batch, kv_head, slot) float32, from 0 to 1.
    Source: arXiv:2507.08143; NVIDIA/kvpress `leverage_press.py`.
    Differs: the sketch is one for each layer and KV head, whatever the sample and seed (kvpress draws one
    at every call); solved in float64, where kvpress adds more to the diagonal until float32 succeeds; not
    standardised, which changes no ranking. `sketch=0`: exact. In chunked runs: among the cached slots.
    """

    needs = frozenset({Need.UNROTATED_KEYS})
    ranking = "by descending leverage"
    repeated = "kept and new tokens are ranked again, by their leverage among each other"
    exactness = "official code"
    parity = "kvpress"
    color = "#1F77B4"

    sketch: int = param(48, "kvpress")

    def __post_init__(self) -> None:
        if self.sketch < 0:
            raise BadInput(f"leverage: sketch={self.sketch}; use 1 or more dimensions, or 0 for none")

    def score(self, seen: Observation) -> torch.Tensor:
        inside = torch.ones_like(seen.positions, dtype=torch.bool)
        return leverage_scores(seen.unrotated_keys, inside, seen.layer, self.sketch)


def leverage_scores(keys: torch.Tensor, inside: torch.Tensor, layer: int, sketch: int) -> torch.Tensor:
    """Leverage among the slots that are `inside`, 0 for the others: (batch, kv_head, slot) float32."""
    inside = inside[..., None]
    mean = (keys * inside).sum(2, keepdim=True) / inside.sum(2, keepdim=True).clamp_min(1)
    x = ((keys - mean) * inside).double()
    if sketch:
        x = x @ gaussian(layer, keys.shape[1], keys.shape[3], sketch).to(keys.device)
    gram = x.transpose(-1, -2) @ x
    gram = gram + 0.01 * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return ((x @ torch.linalg.inv_ex(gram).inverse) * x).sum(-1).clamp_min(0).float()


def gaussian(layer: int, kv_heads: int, dim: int, sketch: int) -> torch.Tensor:
    """The layer's sketch: (kv_head, dim, sketch) float64 on the CPU, drawn anew each time, always alike."""
    draw = torch.Generator().manual_seed(draw_key("leverage", layer) & 0x7FFFFFFF)
    return torch.randn(kv_heads, dim, sketch, generator=draw, dtype=torch.float64) / sketch**0.5
