"""A task and policies that misbehave, for runs of the laws; a subprocess registers them, too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import POLICIES, TASKS, register, register_task
from kvbench.contract.task import Answer, Sample, Samples, Setting, Task

KILL = "KVBENCH_LAWS_KILL"  # "kind/sample": the process dies when it scores that sample
COUNT = 4
FAULTS = {
    "raise": "ZeroDivisionError",
    "nan": "NaN",
    "shape": "shape",
    "dtype": "dtype",
    "undeclared": "declared",
    "type": "Tensor",
    "writes keys": "writes into keys,",
    "writes positions": "writes into positions,",
    "writes shared": "writes into shared ('window', 4),",
    "exit": "SystemExit",
    "sparse": "plain dense torch.Tensor",
    "subclass": "Parameter",
}


@dataclass(frozen=True)
class Toy(Task):
    """Sentences of a story; a question about it with two choices, or a text to go on with."""

    metric = "accuracy"
    question = "withheld"
    data = "written here"

    kind: str = param("choices", "none")
    ids: str = param("0123", "none")
    twins: bool = param(False, "none")

    def samples(self, setting: Setting) -> Samples:
        made = [self._sample(int(name)) for name in self.ids]
        return Samples(made, "the laws' own toy", "0" * 64)

    def _sample(self, index: int) -> Sample:
        name = str(index)
        number = 3 if self.twins else index
        story = f"hello world, the {number} is in the answer. " * (number + 1)
        story += "hello wor"  # the context ends inside a token
        if self.kind == "choices":
            question = "ld, is the world in it? Ans"
            return Sample(name, story, question, "wer", choices=("wer", "x"), gold=index % 2)
        return Sample(name, story, "ld, the answer is in", " the world", max_new_tokens=5)

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        if os.environ.get(KILL) == f"{self.kind}/{sample.id}":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"accuracy": float(answer.label == str(sample.gold))}

    def label(self, sample: Sample) -> str | None:
        return sample.choices[sample.gold].strip() if self.kind == "choices" else None


@dataclass(frozen=True)
class Faulty(Policy):
    """Breaks the contract in one way, in layer 2, once `after` tokens have been read."""

    needs = frozenset({Need.KEYS, Need.WINDOW_QUERIES})
    fault: str = param("raise", "none")
    after: int = param(0, "none")

    def score(self, seen: Observation) -> Tensor:
        score = seen.positions.float()
        if seen.layer != 2 or seen.seen <= self.after:
            return score
        if self.fault == "raise":
            return score / (1 // 0)
        if self.fault == "undeclared":
            return seen.attention_sums.mean(1)
        if self.fault.startswith("writes"):
            return self._write(seen, score)
        if self.fault == "exit":
            raise SystemExit(3)
        wrong = {
            "nan": score * torch.nan,
            "shape": score[..., 1:],
            "dtype": score.double(),
            "type": None,
            "sparse": score.to_sparse(),
            "subclass": torch.nn.Parameter(score),
        }
        return wrong[self.fault]  # type: ignore[return-value]

    def _write(self, seen: Observation, score: Tensor) -> Tensor:
        if self.fault == "writes keys":
            keys = seen.keys.float()  # no copy, where the model runs in float32
            keys -= keys.mean(2, keepdim=True)
        elif self.fault == "writes shared":
            seen.window_attention(4).clamp_(max=0.1)
        else:
            seen.positions.add_(1)
        return score


def add() -> None:
    register_task("laws_toy", source="tests")(Toy)
    register("laws_faulty", source="tests")(Faulty)


@contextmanager
def added() -> Iterator[None]:
    """Known inside the block only: no other test sees these names."""
    with (
        patch.object(TASKS, "_places", dict(TASKS._found())),
        patch.object(TASKS, "_classes", dict(TASKS._classes)),
        patch.object(POLICIES, "_places", dict(POLICIES._found())),
        patch.object(POLICIES, "_classes", dict(POLICIES._classes)),
    ):
        add()
        yield
