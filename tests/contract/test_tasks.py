"""The contract every registered task keeps; `pytest -k NAME` runs it for one, plugins included."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvbench.contract.metrics import METRICS
from kvbench.contract.registry import TASKS, parameters
from kvbench.contract.task import Answer, Sample, Samples, Setting, Task
from kvbench.errors import BadInput, DataNotFound
from kvbench.model.prompt import build_prompt, count_tokens, render_turns, token_ends
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
LENGTH = 8192  # tokens of bytes: room for the longest question of RULER's subtasks
SPECS = {
    "lm_eval": "lm_eval:arc_challenge",  # must be given
    "mmlu": "mmlu:subject=anatomy,shots=2",  # one subject of 57, to be quick
}
DATA = {
    "gov_report": "longbench_gov_report_test.jsonl",
    "passage_retrieval_en": "longbench_passage_retrieval_en_test.jsonl",
    "passage_retrieval_zh": "longbench_passage_retrieval_zh_test.jsonl",
    "lm_eval": "ai2_arc_challenge_validation.jsonl",
    "ppl/oasst": "oasst1_validation_en.jsonl",
    "ruler/qa_1": "squad_v2_validation.jsonl",
    "ruler/qa_2": "hotpot_qa_distractor_validation.jsonl",
}
EXAMPLE = "echo"  # of CONTRIBUTING.md


@functools.cache
def example() -> type[Task]:
    """The task in CONTRIBUTING.md, imported as it is written there; no other test sees it registered."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = next(part for part in re.findall(r"```python\n(.*?)```", text, re.S) if "register_task" in part)
    assert len(code.splitlines()) < 40
    TASKS.names()
    module = sys.modules["echo"] = ModuleType("echo")
    exec(compile(code, "CONTRIBUTING.md", "exec"), vars(module))
    for known in (TASKS._places, TASKS._classes):
        assert known is not None
        known.pop(EXAMPLE)
    return module.Echo


def task_of(name: str) -> Task:
    if name == EXAMPLE:
        return example()()
    spec = SPECS.get(name, name)
    known = {parameter.name for parameter in parameters(TASKS.get(name))}
    if name.startswith("ruler/") and "length" in known:
        spec += f":length={LENGTH}"
    try:
        return TASKS.parse(spec)
    except BadInput as error:
        pytest.skip(f"needs parameters that this test does not know: {error}")


def data_of(name: str, task: Task) -> str | None:
    """--data where the task needs it. Skips where the rows are not on this machine."""
    try:
        task.check(None)
        return None
    except DataNotFound:
        path = SHARED / DATA.get(name, "?")
        if not path.is_file():
            pytest.skip(f"no data for {name} on this machine")
        task.check(str(path))
        return str(path)
    except BadInput as error:
        pytest.skip(f"{name} cannot run here: {error}")


def setting(data: str | None, limit: int, chat: bool) -> Setting:
    tokenizer = tiny_tokenizer(chat=chat)
    return Setting(
        seed=3, limit=limit, data=data, chat=chat,
        count=lambda sample: count_tokens(sample, tokenizer, chat),
        render=lambda turns, answer=False: render_turns(turns, tokenizer, chat, answer),
        ends=lambda text: token_ends(text, tokenizer),
    )  # fmt: skip


@functools.cache
def made(name: str, limit: int, chat: bool = False) -> tuple[Task, Samples]:
    task = task_of(name)
    return task, task.samples(setting(data_of(name, task), limit, chat))


def answers(sample: Sample) -> Iterator[Answer]:
    """Right, wrong and odd answers."""
    count = len(sample.choices)
    for best in range(count):
        numbers = tuple(-1.0 - (index != best) for index in range(count))
        yield Answer(loglikelihoods=numbers, greedy=tuple(index == best for index in range(count)))
    if not count and sample.max_new_tokens:
        for text in (sample.reference, "", " ", "\n\n", "no", "7 段落 12 Paragraph 3", "x" * 500):
            yield Answer(text=text)


pytestmark = pytest.mark.parametrize("name", [*TASKS.names(), EXAMPLE])


def test_it_says_what_it_is(name: str) -> None:
    cls = example() if name == EXAMPLE else TASKS.get(name)
    assert cls.source
    assert cls.data
    assert "Source:" in (cls.__doc__ or ""), "the docstring says where the task comes from"
    assert dataclasses.is_dataclass(cls)
    assert vars(cls)["__dataclass_params__"].frozen
    assert [p.name for p in parameters(cls) if not p.source and p.default is not dataclasses.MISSING] == []
    assert not cls.metric or cls.metric in METRICS


def test_samples_are_the_same_again_whatever_the_limit(name: str) -> None:
    task, first = made(name, 2)
    more = task.samples(setting(data_of(name, task), 3, False))
    assert list(first.samples) == list(more.samples[:2])
    assert (first.source, first.sha256) == (more.source, more.sha256)
    assert first.source
    assert first.sha256


@pytest.mark.parametrize("chat", [False, True])
def test_samples_can_be_asked(name: str, chat: bool) -> None:
    task, built = made(name, 2, chat)
    tokenizer = tiny_tokenizer(chat=chat)
    assert built.samples
    assert len({sample.id for sample in built.samples}) == len(built.samples)
    for sample in built.samples:
        assert sample.reference
        assert sample.reference in sample.choices or not sample.choices
        assert sample.max_new_tokens >= 0
        prompt = build_prompt(sample, tokenizer, "withheld", chat and task.template != "none")
        assert prompt.context or sample.bare or not sample.context
        assert prompt.reference.ids


def test_scores_are_metrics_in_their_units(name: str) -> None:
    task, built = made(name, 2)
    for sample in built.samples:
        for answer in answers(sample):
            score = task.score(sample, answer)
            assert score == task.score(sample, answer)
            assert (built.metric or task.metric) in score
            for metric, value in score.items():
                assert metric in METRICS, f"declare {metric} with kvbench.contract.metrics.add_metric"
                assert isinstance(value, float)
                assert math.isfinite(value)
                low, high = METRICS[metric].limits or (None, None)
                assert low is None or value >= low
                assert high is None or value <= high


def test_the_right_answer_scores_best(name: str) -> None:
    task, built = made(name, 2)
    for sample in built.samples:
        metric = built.metric or task.metric
        found = [(answer, task.score(sample, answer)[metric]) for answer in answers(sample)]
        if not found:
            pytest.skip("nothing is answered: the reference is measured")
        right = sample.choices.index(sample.reference) if sample.choices else 0
        best = (max if METRICS[metric].better == "higher" else min)(value for _, value in found)
        assert found[right][1] == best
        assert len({value for _, value in found}) > 1, "right and wrong answers score the same"


def test_bad_data_is_refused(name: str, tmp_path: Path) -> None:
    task = task_of(name)
    if not task.takes_data:
        pytest.skip("generated: it reads no data")
    empty = tmp_path / "rows.jsonl"
    empty.write_text('{"nothing": 1}\n')
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(BadInput):
            task.check(str(path))
    with pytest.raises(BadInput):
        check_and_build(task, str(empty))


def check_and_build(task: Task, path: str) -> None:
    """What a run does with --data before a model loads."""
    task.check(path)
    task.samples(setting(path, 2, False))
