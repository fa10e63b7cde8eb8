"""Recipes of KVP: every setting of a training run, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.contract.pins import Pins, parse_pins
from kvbench.errors import BadInput
from kvbench.learn.training import Split

from .objectives import BudgetWeighting, objective
from .scorer import PositionFeature


@dataclass(frozen=True)
class KVPRecipe:
    """A recipe. Paper values: hidden 256, lr 5e-5, 4000 steps, warm-up 100, clip 5, uniform splits.

    split: where the future begins; uniform over the trace, boundary (the end of the context, where
    compression happens), or mix (half and half). samples: permutations per step (K). budgets: weighting
    of the budgets in the reward. pins: FIRST,LAST tokens left out of the ranking, as at inference, or none;
    pinned_share: the share of steps that leave them out, so that the ranking is also good without pins.
    validation: share of the traces, the last ones, that only measure.
    """

    steps: int = 1500
    objective: str = "rl"
    split: Split = "mix"
    budgets: str = "uniform"
    position: PositionFeature = "log"
    hidden: int = 128
    samples: int = 8
    lr: float = 1e-3
    last_lr: float = 1e-6
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 5.0
    pins: str = "4,16"
    pinned_share: float = 0.5
    seed: int = 0
    validation: float = 0.1

    def __post_init__(self) -> None:
        objective(self.objective)
        BudgetWeighting.parse(self.budgets)
        if parse_pins(self.pins) is None:
            raise BadInput(f"--pins '{self.pins}': a recipe pins FIRST,LAST tokens, as in 4,16, or none")
        if self.split not in ("uniform", "boundary", "mix"):
            raise BadInput(f"--split '{self.split}': choose uniform, boundary or mix")
        if self.steps < 1 or self.samples < 2 or not 0 < self.validation < 1:
            raise BadInput(
                f"steps {self.steps}, samples {self.samples}, validation {self.validation}: "
                "steps are 1 or more, samples 2 or more, validation between 0 and 1"
            )
        if min(self.lr, self.clip, self.hidden) <= 0 or min(self.last_lr, self.warmup, self.weight_decay) < 0:
            raise BadInput(
                f"lr {self.lr}, clip {self.clip}, hidden {self.hidden}, last_lr {self.last_lr}, "
                f"warmup {self.warmup}, weight_decay {self.weight_decay}: "
                "the first three are more than 0, the others 0 or more"
            )

    def pinned_at(self, step: int) -> Pins:
        """The pins of a step: those of the recipe in `pinned_share` of all steps, evenly spread."""
        counts = int((step + 1) * self.pinned_share) > int(step * self.pinned_share)
        return (parse_pins(self.pins) or Pins()) if counts else Pins()


RECIPES = {  # the first is the default
    "cpu": KVPRecipe(objective="softcost"),
    "paper": KVPRecipe(
        steps=4000,
        split="uniform",
        hidden=256,
        lr=5e-5,
        position="normalised",
        validation=0.05,
        pinned_share=1.0,
    ),
}
