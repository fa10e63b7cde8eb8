"""The contract of a policy whose numbers were measured on traces and lie in a file, see `calibration`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .policy import Policy, TrainedFor

if TYPE_CHECKING:
    from .calibration import Calibration
    from .seen_text import SeenText


@dataclass(frozen=True)
class Calibrated(Policy):
    """Base of such policies: what the file says of the model it fits, its identity, its text and its card."""

    @property
    def calibration(self) -> Calibration | None:
        """What the file holds; None where this policy's settings ask for none."""
        raise NotImplementedError

    @property
    def trained_for(self) -> TrainedFor | None:
        return None if self.calibration is None else self.calibration.trained_for

    @property
    def identity(self) -> str:
        return "" if self.calibration is None else self.calibration.identity

    @property
    def seen_text(self) -> SeenText | None:
        return None if self.calibration is None else self.calibration.seen

    @property
    def card(self) -> Mapping[str, Any]:
        return {} if self.calibration is None else dict(self.calibration.card)
