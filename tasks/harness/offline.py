"""lm-eval's task object over rows that we hold: nothing is downloaded, everything else is lm-eval's.

This module imports lm_eval (two seconds): it is imported when samples are built, not before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from kvbench.contract.data import DataRow
from kvbench.contract.metrics import Metric, add_metric, is_known
from kvbench.contract.task import Answer
from kvbench.errors import BadInput

from .border import in_turns, marked, split
from .config import SPLITS, Config, evaluated_split, fewshot_split

Render = Callable[[list[dict[str, str]]], str]  # turns -> text, with the model's turn open
FEWSHOT_SEED = 1234  # lm-eval's own default
NO_SYSTEM = "the chat template takes no system turn: lm-eval leaves the description out"
OURS = {"acc": "accuracy"}  # one word for one thing; every other metric keeps lm-eval's name


@dataclass(frozen=True)
class DocumentPrompt:
    """One document as lm-eval asks it. context + question: the final text, template included.

    requests: lm-eval's, one per choice or one to generate from. gold: index of the right choice, or its
    text. bare: whether only a template precedes the question. note: what lm-eval left out.
    """

    context: str
    question: str
    requests: list[Instance]
    gold: int | str
    bare: bool
    note: str


def _table(rows: list[DataRow]) -> datasets.Dataset:
    """Rows as lm-eval reads them. Raises BadInput for a row without a column that another one has: the table
    would lose it, or show the word None in a prompt."""
    columns = dict.fromkeys(name for row in rows for name in row)
    for number, row in enumerate(rows, 1):
        if missing := [name for name in columns if name not in row]:
            raise BadInput(
                f"row {number} has no column {', '.join(missing)}, which others have: give all the same ones"
            )
    return datasets.Dataset.from_list(rows)


class Offline(ConfigurableTask):
    """A configured lm-eval task; `task_docs`, `ask` and `grade` are what is used of it."""

    def __init__(self, config: Config, rows: list[DataRow], shown: list[DataRow], border: str) -> None:
        """rows: the split that is evaluated. shown: the few-shot examples' split, may be empty."""
        name, few = evaluated_split(config), fewshot_split(config)
        self.dataset = {name: _table(rows)}
        if shown and few != name:
            self.dataset[few] = _table(shown)
        there = {key: config[key] for key in SPLITS if config.get(key) in self.dataset}
        own = {key: value for key, value in config.items() if key not in SPLITS}
        self.border = border
        self.asked: Mapping[str, Any] | None = None  # the document that is being rendered
        super().__init__(config={**own, **there})

    def download(self, *args: Any, **kwargs: Any) -> None:
        """The rows are there already."""

    def doc_to_text(self, doc: Any, doc_to_text: Any = None) -> Any:
        text = super().doc_to_text(doc, doc_to_text)
        if self.asked is None or doc is not self.asked:
            return text
        if not isinstance(text, str):
            raise BadInput("each choice has a prompt of its own (lm-eval's multiple inputs)")
        return marked(text, doc, self.border, super().doc_to_text)

    def ask(self, index: int, doc: Mapping[str, Any], chat: bool, render: Render) -> DocumentPrompt:
        """One document, as lm-eval's runner would ask it with a template (chat) or without.

        Ask in order: lm-eval draws few-shot examples from one stream of random numbers.
        Raises BadInput naming the row when lm-eval cannot render it.
        """
        shown: list[list[dict[str, str]]] = []  # the turns that were rendered

        def template(turns: list[dict[str, str]], **_: Any) -> str:
            try:
                text = in_turns(turns, render)
            except BadInput:
                if turns[0]["role"] != "system":
                    raise
                turns = turns[1:]
                text = in_turns(turns, render)
            shown.append(turns)
            return text

        self.asked = doc
        try:
            text = self.fewshot_context(
                doc,
                num_fewshot=self.config.num_fewshot or 0,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                chat_template=template if chat else None,
                gen_prefix=self.doc_to_prefix(doc),
            )
            context, question = split(text)
            bare = not (split("".join(turn["content"] for turn in shown[0]))[0] if chat else context)
            about = (self.config.task, index, self.config.repeats)
            made = self.construct_requests(
                doc, context + question, metadata=about, apply_chat_template=chat
            )  # fmt: skip
            gold = self._gold(doc)
        except Exception as error:  # whatever a configuration's template or function raises
            raise _refused(f"row {index}", error) from error
        finally:
            self.asked = None
        requests = made if isinstance(made, list) else [made]
        described = bool(self.resolve_field(dict(doc), self.config.description))
        left_out = chat and described and shown[0][0]["role"] != "system"
        return DocumentPrompt(context, question, requests, gold, bare, NO_SYSTEM if left_out else "")

    def delimiter(self, doc: Mapping[str, Any], chat: bool) -> str:
        """What stands between the prompt and the answer. A template opens the model's turn itself, so there
        nothing does, except after an answer prefix that does not end in white space.
        """
        prefix = self.doc_to_prefix(doc) or " "
        return "" if chat and prefix[-1].isspace() else str(self.config.target_delimiter)

    def grade(self, requests: list[Instance], answer: Answer) -> dict[str, float]:
        """lm-eval's filters and metrics of one answer; only metrics that are means over samples.

        With several filters each metric is named METRIC/FILTER.
        """
        given: list[Any] = [answer.text]
        if answer.loglikelihoods:
            given = list(zip(answer.loglikelihoods, answer.greedy, strict=True))
        pairs = zip(requests, given, strict=True)
        copies = [
            dataclasses.replace(
                request, resps=[one] * self.config.repeats, filtered_resps={}, metadata=_about(request)
            )
            for request, one in pairs
        ]
        for one in self._filters:
            one.apply(copies)
        found: dict[str, float] = {}
        for filtered in copies[0].filtered_resps:
            results = self.process_results(copies[0].doc, [copy.filtered_resps[filtered] for copy in copies])
            for name, value in results.items():
                if name in self.means:
                    suffix = f"/{filtered}" if len(self._filters) > 1 else ""
                    found[OURS.get(name, name) + suffix] = float(value)
        return found

    @property
    def means(self) -> list[str]:
        """lm-eval's metrics that are means over samples, in its order; others need all answers at once."""
        return [name for name, how in self.aggregation().items() if how.__name__ == "mean"]

    @property
    def names(self) -> list[str]:
        """What `grade` reports."""
        filters = [one.name for one in self._filters]
        suffixes = [f"/{name}" for name in filters] if len(filters) > 1 else [""]
        return [OURS.get(name, name) + suffix for name in self.means for suffix in suffixes]

    def _gold(self, doc: Any) -> int | str:
        target = self.doc_to_target(doc)
        if isinstance(target, list):
            target = target[0]
        if self.config.doc_to_choice is None:
            return str(target)
        choices = self.doc_to_choice(doc)
        gold = target if isinstance(target, int) else choices.index(target)
        if not 0 <= gold < len(choices):
            raise ValueError(f"the right choice is number {gold} of {len(choices)}")
        return gold if self.OUTPUT_TYPE == "multiple_choice" else choices[gold]


def load(
    config: Config, rows: list[DataRow], shown: list[DataRow], border: str, shots: int | None
) -> Offline:
    """lm-eval's task over these rows. shots: few-shot examples, None as the configuration says.

    Declares the task's metrics. Raises BadInput when lm-eval cannot read the rows.
    """
    changes = {} if shots is None else {"num_fewshot": shots}
    with quiet():
        try:
            task = Offline({**config, **changes}, rows, shown, border)
        except Exception as error:  # whatever a configuration's functions raise
            raise _refused("the rows", error) from error
    if not task.means:
        raise BadInput(f"lm-eval's {config.get('task')} has no metric that is a mean over samples")
    task.set_fewshot_seed(FEWSHOT_SEED)
    for name in task.names:
        if not is_known(name):
            higher = task.higher_is_better().get(name.split("/")[0], True)
            words = f"lm-eval's {name} in {config.get('task')}"
            add_metric(Metric(name, "", words, "higher" if higher else "lower", None))
    return task


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, and no advice of lm-eval on its own configurations."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _about(request: Instance) -> tuple[Any, Any, Any]:
    return request.task_name, request.doc_id, request.repeats


def _refused(what: str, error: Exception) -> BadInput:
    if isinstance(error, BadInput):
        return BadInput(f"{what}: {error}")
    reason = " ".join(str(error).split()) or "no reason given"
    return BadInput(f"lm-eval cannot use {what} ({type(error).__name__}: {reason}); repair the data")
