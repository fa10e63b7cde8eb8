"""LongBench: summarise a report, or find the paragraph that an abstract was written from.

One row of THUDM/LongBench (Xnhyacinth/LongBench calls `input` `question`):

    {"input": "The abstract ...", "context": "Paragraph 1: ...", "answers": ["Paragraph 15"],
     "length": 9805, "language": "en", ...}

The quirk that matters: documents have 5,000 to 20,000 tokens, more than a small model reads. Such samples
are skipped with their length, or shortened as LongBench's own code does: `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from kvbench.contract.data import DataRow, Dataset, rows
from kvbench.contract.metrics import Metric, add_metric
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Sample, Setting
from kvbench.errors import BadInput

from .harness.base import Harness, HarnessRows
from .harness.config import path_of, read

SOURCE = "arXiv:2308.14508"
CHUNK = 4096  # tokens; ours: the paper chunks these tasks, and names no size

add_metric(Metric("rouge_score", "0..1", "ROUGE-L F1, the best over the references (LongBench)"))
add_metric(Metric("retrieval_score", "0..1", "share of the numbers in the answer that are right (LongBench)"))
add_metric(
    Metric("retrieval_zh_score", "0..1", "share of the numbers in the answer that are right (LongBench)")
)


@dataclass(frozen=True)
class LongBench(Harness):
    """Base of the LongBench tasks. The context ends with the document, the question is the rest.

    subset: of the data set.
    """

    border = "context"
    packages = ("jieba", "fuzzywuzzy", "rouge")
    subset: ClassVar[str] = ""
    too_long: ClassVar[str] = "the task's max_tokens=N cuts the middle of such documents"

    max_tokens: int | None = param(
        None,
        "ours: nothing is cut, and what the model cannot read is skipped; else prompt and answer together, "
        "and longer documents lose their middle, as in LongBench's code",
    )

    def datasets(self) -> list[Dataset]:
        columns = (("question", "input"), "context", "answers")
        return [Dataset("Xnhyacinth/LongBench", self.subset, "test", None, columns)]

    def parts(self, setting: Setting) -> tuple[list[HarnessRows], str, str]:
        found, source, sha256 = rows(self.datasets()[0], setting.data)
        docs = [
            {
                "question": row.get("question", row.get("input")),
                "context": row["context"],
                "answers": row["answers"],
            }
            for row in found[: setting.limit]
        ]
        return [HarnessRows(read(path_of(f"longbench/{self.subset}.yaml")), docs)], source, sha256

    def fitted(self, doc: DataRow, write: Callable[[DataRow], Sample], setting: Setting) -> Sample:
        """Cut the middle of the document until prompt and answer take at most max_tokens."""
        sample = write(doc)
        if self.max_tokens is None:
            return sample
        text = doc["context"]
        ends = [0, *setting.ends(text)]
        room = self.max_tokens - sample.max_new_tokens
        total = kept = len(ends) - 1
        over = setting.count(sample) - room
        while over > 0:
            kept -= over
            if kept < 0:
                raise BadInput(
                    f"{self.name}:max_tokens={self.max_tokens} leaves no room for the document: the rest of "
                    f"the prompt and the answer take {self.max_tokens - kept} tokens; raise it"
                )
            half = kept // 2
            tail = text[ends[total - (kept - half)] :]
            sample = write({**doc, "context": text[: ends[half]] + tail})
            over = setting.count(sample) - room
        return replace(
            sample, cut=total - kept, note=_note(sample, self.max_tokens) if kept < total else sample.note
        )


def _note(sample: Sample, limit: int) -> str:
    cut = f"the middle of the document is cut to fit max_tokens={limit}"
    return f"{sample.note}; {cut}" if sample.note else cut


@register_task("gov_report", source=SOURCE)
@dataclass(frozen=True)
class GovReport(LongBench):
    """Summaries of government reports, as lm-evaluation-harness defines them; ROUGE-L.

    The request for a summary is withheld while the report is read, as in the KVP paper.

    Source: arXiv:2308.14508; lm-eval task `longbench_gov_report`, version 5.0.
    """

    metric = "rouge_score"
    reported = ("rouge_score",)
    question = "withheld"
    data = "LongBench gov_report, 200 reports (--data, or the hub)"
    subset = "gov_report"


@register_task("passage_retrieval_en", source=SOURCE)
@dataclass(frozen=True)
class PassageRetrievalEn(LongBench):
    """Which of 30 English paragraphs is an abstract about? As lm-evaluation-harness defines it.

    Read in chunks, as in the KVP paper, which does not state their size.

    Source: arXiv:2308.14508; lm-eval task `longbench_passage_retrieval_en`, version 5.0.
    """

    metric = "retrieval_score"
    reported = ("retrieval_score",)
    schedule = "chunked"
    chunk = CHUNK
    data = "LongBench passage_retrieval_en, 200 abstracts (--data, or the hub)"
    subset = "passage_retrieval_en"


@register_task("passage_retrieval_zh", source=SOURCE)
@dataclass(frozen=True)
class PassageRetrievalZh(LongBench):
    """Which of several Chinese paragraphs is an abstract about? As lm-evaluation-harness defines it.

    Read in chunks, as in the KVP paper, which does not state their size.

    Source: arXiv:2308.14508; lm-eval task `longbench_passage_retrieval_zh`, version 5.0.
    """

    metric = "retrieval_zh_score"
    reported = ("retrieval_zh_score",)
    schedule = "chunked"
    chunk = CHUNK
    data = "LongBench passage_retrieval_zh, 200 abstracts (--data, or the hub)"
    subset = "passage_retrieval_zh"
