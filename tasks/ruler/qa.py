"""RULER's questions: SQuAD (qa_1) and HotpotQA (qa_2), the answer's documents among distractors.

    Answer the question based on the given documents. Only give me the answer and do not output any other
    words.

    The following are given documents.

    Document 1:
    The Normans (Norman: Nourmands; ...

    Answer the question based on the given documents. Only give me the answer and do not output any other
    words.

    Question: In what country is Normandy located? Answer:

The quirk that matters: a model may know the answer without the documents, so a policy can look better
than what it kept; compare with a budget of a few tokens.
"""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvbench.contract.data import DataRow, Dataset, check, rows
from kvbench.contract.identity import fingerprint
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Answer, Sample, Setting
from kvbench.errors import BadInput

from .base import Draft, Generator, Ruler, Text

SOURCE = "arXiv:2404.06654"
ORDER = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words."
)
HEAD = f"{ORDER}\n\nThe following are given documents.\n\n"
QUESTION = f"{ORDER}\n\nQuestion: "
SQUAD = Dataset(
    hub="rajpurkar/squad_v2",
    config=None,
    split="validation",
    folder=None,
    columns=("question", "context", "answers", "title"),
)
HOTPOT = Dataset(
    hub="hotpotqa/hotpot_qa",
    config="distractor",
    split="validation",
    folder=None,
    columns=("question", "answer", "context", "supporting_facts"),
)


@dataclass(frozen=True)
class Question:
    """gold: documents with the answer. near: distractors to take first. Both are indices of documents."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class Qa(Ruler):
    """Base of the two: reads the data, mixes documents."""

    takes_data = True

    dataset: ClassVar[Dataset]

    max_new_tokens: int = param(32, "RULER")
    file: str | None = param(None, "ours: the data, where --data belongs to another task of the run")

    @staticmethod
    @abstractmethod
    def unpack(document: Any) -> list[DataRow]:
        """Rows in the hub's schema from the data set's original JSON document."""

    @staticmethod
    @abstractmethod
    def questions(found: list[DataRow]) -> tuple[list[Question], list[str]]:
        """(questions in the data's order, all documents, each once)."""

    def check(self, data: str | None) -> None:
        path = self.file or data
        if path is not None and Path(path).suffix == ".json":
            self._original(path)
        else:
            check(self.dataset, path)

    def generator(self, setting: Setting) -> Generator:
        path = self.file or setting.data
        if path is not None and Path(path).suffix == ".json":
            found, source = self._original(path), f"file {Path(path).name}"
        else:
            found, source, _ = rows(self.dataset, path)
        asked, documents = self.questions(found)
        if not asked:
            raise BadInput(f"{self.name}: {source} has no question with an answer; give another file")

        def draft(index: int, draw: random.Random) -> Draft:
            return _draft(asked[index], documents, draw)

        recipe = [documents, [[one.text, one.answers, one.gold] for one in asked]]
        return Generator(draft, source, [fingerprint(recipe)], total=len(asked), skip=True)

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Whether any of the accepted answers is in the text, whatever the case (string_match_part)."""
        return {"string_match": float(any(self._found(sample, answer)))}

    def _original(self, path: str) -> list[DataRow]:
        """Rows of a file in the data set's original layout, one JSON document."""
        hint = f"give its original .json, or a .jsonl in the schema of {self.dataset.hub}"
        try:
            found = self.unpack(json.loads(Path(path).expanduser().read_text(encoding="utf-8-sig")))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise BadInput(f"{self.name}: {path} cannot be read as JSON ({error}); {hint}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"{self.name}: {path} has another layout ({error!r}); {hint}") from None
        return found


def _draft(question: Question, documents: list[str], draw: random.Random) -> Draft:
    """A question with distractors in units of words; the last distractor may be cut between words."""
    near = draw.sample(question.near, len(question.near))
    taken = {*question.gold, *near}
    far = [index for index in range(len(documents)) if index not in taken]
    draw.shuffle(far)
    # Line breaks stay with the word before them, so that whole documents come out unchanged.
    others = [documents[index].split(" ") for index in near + far]
    order = draw.random()

    def write(size: int) -> Text:
        chosen = [documents[index] for index in question.gold]
        for words in others:
            if size <= 0:
                break
            chosen.append(" ".join(words[:size]))
            size -= len(words)
        random.Random(order).shuffle(chosen)
        body = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(chosen, 1))
        reference = f" {question.answers[0]}"
        return Text(f"{HEAD}{body}\n\n", QUESTION + question.text, "Answer:", reference, question.answers)

    return Draft(write, sum(map(len, others)))


@register_task("ruler/qa_1", source=SOURCE)
@dataclass(frozen=True)
class Squad(Qa):
    """RULER qa_1: a question of SQuAD 2.0 and its paragraph among other paragraphs.

    Distractors come from the same article first, then from the others. Questions without an answer
    are not asked. Reference: the first accepted answer.

    Data: dev-v2.0.json or rows of rajpurkar/squad_v2 (or of SQuAD 1.1) by --data, else the hub.
    Source: RULER, arXiv:2404.06654 (format and scoring of NVIDIA/RULER); SQuAD, arXiv:1806.03822.
    Differs: one distractor is cut between words, so that the length is exact; questions whose own
    documents do not fit are left out, which the sample's numbers show. Every sample has its own order
    of documents.
    """

    dataset = SQUAD
    data = "SQuAD 2.0 dev (--data, or the hub)"

    @staticmethod
    def unpack(document: Any) -> list[DataRow]:
        return [
            {
                "title": article["title"],
                "context": paragraph["context"],
                "question": asked["question"],
                "answers": {"text": [answer["text"] for answer in asked["answers"]]},
            }
            for article in document["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]

    @staticmethod
    def questions(found: list[DataRow]) -> tuple[list[Question], list[str]]:
        documents = list(dict.fromkeys(row["context"] for row in found))
        index = {text: i for i, text in enumerate(documents)}
        article: dict[str, dict[int, None]] = {}
        for row in found:
            article.setdefault(row["title"], {})[index[row["context"]]] = None
        return [
            Question(
                row["question"],
                tuple(dict.fromkeys(row["answers"]["text"])),
                (index[row["context"]],),
                tuple(i for i in article[row["title"]] if i != index[row["context"]]),
            )
            for row in found
            if row["answers"]["text"]
        ], documents


@register_task("ruler/qa_2", source=SOURCE)
@dataclass(frozen=True)
class Hotpot(Qa):
    """RULER qa_2: a question of HotpotQA and its two documents among other documents.

    Distractors are the question's own eight first, then documents of other questions. Reference: the
    answer.

    Data: hotpot_dev_distractor_v1.json or rows of hotpotqa/hotpot_qa by --data, else the hub.
    Source: RULER, arXiv:2404.06654 (format and scoring of NVIDIA/RULER); HotpotQA, arXiv:1809.09600.
    Differs: as qa_1. RULER always shows the question's ten documents; here only the two that support
    the answer are always there, so that 1024 tokens suffice.
    """

    dataset = HOTPOT
    data = "HotpotQA dev, distractor setting (--data, or the hub)"

    @staticmethod
    def unpack(document: Any) -> list[DataRow]:
        return [
            {
                "question": row["question"],
                "answer": row["answer"],
                "context": dict(zip(("title", "sentences"), zip(*row["context"], strict=True), strict=True)),
                "supporting_facts": {"title": [title for title, _ in row["supporting_facts"]]},
            }
            for row in document
        ]

    @staticmethod
    def questions(found: list[DataRow]) -> tuple[list[Question], list[str]]:
        index: dict[str, int] = {}
        asked = []
        for row in found:
            context = row["context"]
            titles = {
                title: index.setdefault(f"{title}\n{''.join(sentences)}", len(index))
                for title, sentences in zip(context["title"], context["sentences"], strict=True)
            }
            facts = {title for title in row["supporting_facts"]["title"] if title in titles}
            gold = tuple(i for title, i in titles.items() if title in facts) or tuple(titles.values())
            near = tuple(i for i in titles.values() if i not in gold)
            asked.append(Question(row["question"], (row["answer"],), gold, near))
        return asked, list(index)
