"""What policies may look at of a layer beside its cache: its rotation and its output projection."""

from __future__ import annotations

from dataclasses import dataclass

from .need import Need
from .output_projection import OutputProjection
from .rotary import Rotary


@dataclass(frozen=True, eq=False)
class LayerParts:
    """Parts of one layer; None for what could not be read from the model."""

    rotary: Rotary | None
    output: OutputProjection | None

    def missing(self, needs: frozenset[Need]) -> str:
        """Which of the needs cannot be met, in words; "" when all can."""
        if self.rotary is None and needs & ROTATED:
            return "its rotary embedding cannot be read and undone"
        if self.output is None and Need.OUTPUT_WEIGHTS in needs:
            return "no linear layer reads the output of its attention heads as it is"
        return ""


ROTATED = frozenset({Need.ROTARY, Need.UNROTATED_KEYS, Need.QUERY_MOMENTS})
FROM_PARTS = ROTATED | {Need.OUTPUT_WEIGHTS}
