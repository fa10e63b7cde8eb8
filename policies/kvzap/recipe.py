"""The settings of kvzap's training."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import BadInput


@dataclass(frozen=True)
class KVzapRecipe:
    """hidden: width of the MLP, 0 for the linear form. tokens: drawn of each trace, at most. ridge: of the
    linear fit. lr, batch, epochs: of the MLP's. validation: share of traces that only measure."""

    hidden: int = 0
    tokens: int = 500
    ridge: float = 1.0
    lr: float = 5e-3
    batch: int = 512
    epochs: int = 15
    seed: int = 0
    validation: float = 0.1

    def __post_init__(self) -> None:
        if self.hidden < 0 or min(self.tokens, self.batch, self.epochs) < 1 or not 0 < self.validation < 1:
            raise BadInput(
                f"hidden {self.hidden}, tokens {self.tokens}, batch {self.batch}, epochs {self.epochs}, "
                f"validation {self.validation}: use hidden from 0 on, 1 or more of the others, validation "
                "between 0 and 1"
            )
        if not 0 < self.ridge < float("inf") or not 0 < self.lr < float("inf"):
            raise BadInput(f"ridge {self.ridge}, lr {self.lr}: both must be above 0")


RECIPES = {"linear": KVzapRecipe(), "mlp": KVzapRecipe(hidden=512)}
