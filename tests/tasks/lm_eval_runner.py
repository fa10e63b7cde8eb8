"""lm-eval's own runner on our rows and our model: what a task is compared with.

Nothing of kvbench.tasks is used: lm-eval reads its configuration, builds its requests, runs its HFLM
and computes its metrics. Only the download is replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from kvbench.contract.cell import Cell
from kvbench.contract.registry import POLICIES
from kvbench.contract.task import Sample, Samples, Setting, Task
from kvbench.engine.evaluate import evaluate as evaluate_cells
from kvbench.engine.measure import Measurement
from kvbench.model.open import LoadedModel
from kvbench.model.prompt import build_prompt, count_tokens, render_turns, token_ends

SHARED = Path(__file__).parents[3] / "shared" / "data"
Row = dict[str, Any]


def shared(name: str) -> str:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"the shared data sample {name} is not on this machine")
    return str(path)


def official(file: str, rows: list[Row], shots: int = 0, examples: list[Row] | None = None) -> Any:
    """lm-eval's task of a configuration file (inside lm_eval/tasks) over these rows."""
    loader = pytest.importorskip("lm_eval.tasks._yaml_loader", reason="lm-eval 0.4.10 moved its loader")
    config = loader.load_yaml(Path(lm_eval.__file__).parent / "tasks" / file)
    shown = examples or rows

    class Local(ConfigurableTask):
        def download(self, *args: Any, **kwargs: Any) -> None:
            splits = dict.fromkeys(("train", "validation", "dev"), datasets.Dataset.from_list(shown))
            evaluated = config.get("test_split") or config["validation_split"]
            self.dataset = {**splits, evaluated: datasets.Dataset.from_list(rows)}

    return Local(config={**config, "num_fewshot": shots})


def theirs(lm: LoadedModel, model: Any, task: Any, chat: bool = False, max_new: int = 16) -> Any:
    """(samples as lm-eval logs them, by document; aggregated results)."""
    runner = HFLM(pretrained=model, tokenizer=lm.tokenizer, batch_size=1, max_length=lm.geometry.max_length)
    name = task.config.task
    task.set_fewshot_seed(1234)  # what simple_evaluate does before it comes here
    if task.OUTPUT_TYPE == "generate_until":
        task.config.generation_kwargs["max_gen_toks"] = max_new
    found = evaluate(
        runner, {name: task}, apply_chat_template=chat, fewshot_as_multiturn=chat, bootstrap_iters=0
    )
    samples = sorted(found["samples"][name], key=lambda one: one["doc_id"])
    return samples, found["results"][name]


def ours(lm: LoadedModel, task: Task, data: str | None, limit: int, chat: bool = False) -> Samples:
    tokenizer = lm.tokenizer
    return task.samples(
        Setting(
            seed=0, limit=limit, data=data, chat=chat,
            count=lambda sample: count_tokens(sample, tokenizer, chat),
            render=lambda turns, answer=False: render_turns(turns, tokenizer, chat, answer),
            ends=lambda text: token_ends(text, tokenizer),
        )
    )  # fmt: skip


def measured(lm: LoadedModel, sample: Sample, chat: bool = False) -> tuple[Measurement, Measurement]:
    """The full cache, and a budget with room for everything, the question withheld."""
    prompt = build_prompt(sample, lm.tokenizer, "withheld", chat)
    cell = Cell(POLICIES.parse("knorm"), 10**6)
    found = evaluate_cells(lm, sample, prompt, [cell], key=1)
    roomy = found.cells[cell]
    assert isinstance(roomy, Measurement)
    return found.full, roomy
