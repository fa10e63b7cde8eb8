"""Recipes of JudgeQ: every setting of a training run, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import BadInput
from kvbench.learn.training import Split


@dataclass(frozen=True)
class JudgeQRecipe:
    """A recipe. The paper's: 32 tokens, squared error. All else is ours, tuned on held-out eviction cost.

    steps: updates; with 0 the file holds the initial rows. tokens: n. batch: traces per update. start: a
    text whose tokens' embeddings, repeated, are the initial rows; "vocabulary": rows of tokens drawn at
    random. split: where the response begins; the boundary is the end of the context, where compression
    happens. lr of Adam, warmup and last_lr as in `kvbench.learn.training.learning_rate`. checkpointing:
    compute activations again when they are needed: less memory for long contexts or large models, more time.
    validation: share of the traces, the last ones, that only measure.
    """

    steps: int = 500
    tokens: int = 32
    batch: int = 1
    start: str = "vocabulary"
    split: Split = "boundary"
    lr: float = 1e-2
    last_lr: float = 1e-4
    warmup: int = 20
    checkpointing: bool = False
    seed: int = 0
    validation: float = 0.1

    def __post_init__(self) -> None:
        if self.split not in ("uniform", "boundary", "mix"):
            raise BadInput(f"--split '{self.split}': choose uniform, boundary or mix")
        if not self.start:
            raise BadInput("--start '': give a text, or vocabulary for tokens drawn at random")
        if self.steps < 0 or min(self.tokens, self.batch) < 1 or not 0 < self.validation < 1:
            raise BadInput(
                f"steps {self.steps}, tokens {self.tokens}, batch {self.batch}, "
                f"validation {self.validation}: steps are 0 or more, tokens and batch 1 or more, "
                "validation between 0 and 1"
            )
        if self.lr <= 0 or min(self.last_lr, self.warmup) < 0:
            raise BadInput(
                f"lr {self.lr}, last_lr {self.last_lr}, warmup {self.warmup}: lr is more than 0, "
                "the others 0 or more"
            )


RECIPES = {"cpu": JudgeQRecipe()}
