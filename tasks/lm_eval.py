"""Any task of lm-evaluation-harness by its name: `lm_eval:gsm8k,context=question`.

The quirk that matters: lm-eval does not say which part of a prompt a cache would hold. `context` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.contract.data import DataRow, Dataset, rows
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Setting
from kvbench.errors import BadInput

from .harness.base import Harness, HarnessRows, joined
from .harness.border import WHOLE
from .harness.config import Config, evaluated_split, fewshot_split, find, read

OUTPUTS = ("multiple_choice", "generate_until")


@register_task("lm_eval", source="https://github.com/EleutherAI/lm-evaluation-harness")
@dataclass(frozen=True)
class LmEval(Harness):
    """A task of lm-evaluation-harness; prompt, examples, choices, filters and metrics are its own.

    task: lm-eval's name; it may be written first, without `task=`. context: the column whose text ends
    the context; the question is what follows it, and is withheld. Without it the whole prompt is the
    context and the question is seen. Rows come from --data, in the schema of the data set that lm-eval
    names, else from the hub; examples from `examples`, else the hub. Reported are lm-eval's metrics that
    are means over samples (acc is called accuracy), METRIC/FILTER where there are several filters.

    Source: lm-eval's configuration of the task.
    Differs: tasks that compare choices or generate text, greedily. Rolling likelihoods, images, choices
    with prompts of their own, and code that the model writes are refused.
    """

    metric = ""
    data = "rows of the data set that lm-eval names (--data, or the hub)"

    task: str
    context: str | None = param(None, "ours: the whole prompt")
    shots: int | None = param(None, "lm-eval: as the task's configuration says")
    examples: str | None = param(None, "ours: a jsonl file with few-shot examples")

    def __post_init__(self) -> None:
        if self.shots is not None and self.shots < 0:
            raise BadInput(f"lm_eval:shots={self.shots}: a number of examples, 0 or more")
        if self.context is not None:  # a text that follows is a question, which can be withheld
            object.__setattr__(self, "question", "withheld")
        object.__setattr__(self, "border", self.context or WHOLE)

    def datasets(self) -> list[Dataset]:
        config = self._config(functions=False)
        return [_dataset(config, evaluated_split(config))]

    def check(self, data: str | None) -> None:
        config = self._config(functions=False)
        _refuse(self.task, config)
        if data is None and (config.get("dataset_kwargs") or {}).keys() - {"trust_remote_code"}:
            raise BadInput(
                f"lm_eval:{self.task} loads its data with options of its own; give the rows with --data FILE"
            )
        super().check(data)

    def parts(self, setting: Setting) -> tuple[list[HarnessRows], str, str]:
        config = self._config(functions=True)
        found, source, sha256 = rows(self.datasets()[0], setting.data)
        found = [_renamed(row, config) for row in found]
        shown: list[DataRow] = []
        if self._draws_examples(config):
            shown, other, digest = rows(_dataset(config, fewshot_split(config)), self.examples)
            source, sha256 = f"{source}; examples: {other}", joined(sha256, digest)
        elif self.examples:
            raise BadInput(f"lm_eval:{self.task} shows no examples: give shots=N, or leave examples out")
        return [HarnessRows(config, found, shown)], source, sha256

    def few_shots(self) -> int | None:
        return self.shots

    def _config(self, functions: bool) -> Config:
        return read(find(self.task), functions)

    def _draws_examples(self, config: Config) -> bool:
        """Whether few-shot examples are rows of a split; some configurations write them out."""
        shots = config.get("num_fewshot") if self.shots is None else self.shots
        return bool(shots) and not (config.get("fewshot_config") or {}).get("samples")


def _dataset(config: Config, split: str) -> Dataset:
    return Dataset(str(config.get("dataset_path")), config.get("dataset_name"), split, None, ())


def _renamed(row: DataRow, config: Config) -> DataRow:
    """A row as lm-eval reads it: its copy of LongBench calls the published `input` `question`."""
    if str(config.get("dataset_path")).endswith("/LongBench") and "input" in row and "question" not in row:
        return {"question" if name == "input" else name: value for name, value in row.items()}
    return row


def _refuse(name: str, config: Config) -> None:
    """Raises BadInput for what kvbench cannot run as lm-eval does."""
    output = config.get("output_type", "generate_until")
    generation = config.get("generation_kwargs") or {}
    metrics = [item.get("metric") for item in config.get("metric_list") or []]
    reasons = {
        f"its output is {output}; allowed are {' and '.join(OUTPUTS)}": output not in OUTPUTS,
        "it is a class of its own, not a configuration": "class" in config,
        "it makes its data with a function": "custom_dataset" in config,
        "it shows images or plays sound": "doc_to_image" in config or "doc_to_audio" in config,
        "it runs code that the model writes": bool(config.get("unsafe_code")),
        "acc_mutual_info compares with other prompts": "acc_mutual_info" in metrics,
        "it draws its answers at random, and kvbench decodes greedily": bool(generation.get("do_sample")),
        "its prompt comes from promptsource": "use_prompt" in config,
    }
    for reason, found in reasons.items():
        if found:
            raise BadInput(f"lm_eval:{name} cannot run here: {reason}. Choose another task")
