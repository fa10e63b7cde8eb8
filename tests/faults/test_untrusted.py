"""Input that nobody vouches for: one message that says what is wrong, never a traceback, never a path."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.contract import data
from kvbench.contract.data import Dataset, rows
from kvbench.contract.registry import POLICIES, TASKS, register, register_task
from kvbench.contract.task import Task
from kvbench.errors import BadInput, KvbenchError, PluginError
from kvbench.model.open import OpenModel, open_model
from kvbench.show.plot import file_name
from kvbench.study import runner
from kvbench.study.config import RunConfig
from kvbench.study.samples import SampleOptions, TaskSamples, prepare
from tests.laws import toy
from tests.laws.runs import config, python, recorded

FUZZ = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TOY = Dataset("org/toy", None, "test", None, ("question", "answer"))

GOOD: dict[str, dict[str, Any]] = {
    "boolq": {"question": "is it", "passage": "It is.", "answer": True},
    "arc_challenge": {
        "question": "which",
        "choices": {"text": ["a", "b", "c", "d"], "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    "hellaswag": {
        "activity_label": "Running",
        "ctx_a": "A man runs.",
        "ctx_b": "he",
        "endings": ["stops.", "flies.", "sinks.", "sings."],
        "label": "1",
    },
}
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # surrogates and NUL included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def opened(folder: str) -> OpenModel:
    return open_model(folder, "cpu")


def built(opened: OpenModel, task: str, file: Path, *found: Any) -> TaskSamples:
    """The samples that a task makes of these rows."""
    file.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    made: Task = TASKS.parse(task)
    return prepare(made, opened, SampleOptions(made.question, data=str(file)))


@pytest.mark.parametrize("task", GOOD)
@FUZZ
@given(draw=st.data())
def test_rows_of_any_shape_are_samples_or_one_message(
    opened: OpenModel, tmp_path: Path, task: str, draw: st.DataObject
) -> None:
    """One column of a good row, or a part of it, becomes anything that JSON can say, or goes."""
    file = tmp_path / "rows.jsonl"
    assert len(built(opened, task, file, GOOD[task]).items) == 1
    row = json.loads(json.dumps(GOOD[task]))
    name = draw.draw(st.sampled_from(sorted(row)))
    action = draw.draw(st.sampled_from(["replace", "drop", "inside"]))
    if action == "drop":
        del row[name]
    elif action == "inside" and isinstance(row[name], dict):
        row[name][draw.draw(st.sampled_from(sorted(row[name])))] = draw.draw(JSON)
    elif action == "inside" and isinstance(row[name], list):
        row[name][draw.draw(st.integers(0, len(row[name]) - 1))] = draw.draw(JSON)
    else:
        row[name] = draw.draw(JSON)
    with contextlib.suppress(KvbenchError):  # any other exception fails the test
        built(opened, task, file, row)


@FUZZ
@given(text=st.binary(max_size=60) | st.text(st.characters(exclude_categories=["Cs"])).map(str.encode))
def test_files_of_any_bytes_are_rows_or_one_message(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text)
    with pytest.raises(BadInput, match=r"rows.jsonl"):  # no bytes drawn here hold both columns
        rows(TOY, str(file))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": "a\x00b", "answer": 1}', "line 1: not JSON"),
        ('{"question": ' + "9" * 5000 + "}", "line 1: not JSON"),
        ('{"question": "a"}', "no column answer"),
        ('{"a": 1}{"b": 2}', "line 1: not JSON"),
        ('"question answer"', "a str instead of an object"),
    ],
)
def test_odd_lines_are_named(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(BadInput, match=told):
        rows(TOY, str(file))


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LONGEST", 1000)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "a" * 900, "answer": 1}) + "\n" + "[" * 5000)
    with pytest.raises(BadInput, match="line 2: longer than 1000 characters"):
        rows(TOY, str(file))


def test_half_a_surrogate_pair_is_refused(opened: OpenModel, tmp_path: Path) -> None:
    row = {**GOOD["boolq"], "passage": "lone \ud800 here"}
    with pytest.raises(BadInput, match="surrogate"):
        built(opened, "boolq", tmp_path / "rows.jsonl", GOOD["boolq"], row)


def test_nul_bytes_and_controls_are_text_like_any_other(opened: OpenModel, tmp_path: Path) -> None:
    row = {**GOOD["boolq"], "passage": "a\x00b\x07\u2028c"}
    made = built(opened, "boolq", tmp_path / "rows.jsonl", row)
    ((_, prompt),) = made.items
    assert "a\x00b\x07\u2028c" in opened.tokenizer.decode([*prompt.context, *prompt.question])  # type: ignore[union-attr]


@pytest.mark.usefixtures("toys")
def test_b44_too_long_samples_are_skipped_with_a_reason(folder: str, tmp_path: Path) -> None:
    """Nothing is cut silently: the sample has a row that says why it has no number."""
    file = tmp_path / "rows.jsonl"
    long = {**GOOD["boolq"], "passage": "q" * 10_000}
    file.write_text(json.dumps(long) + "\n" + json.dumps(GOOD["boolq"]) + "\n")
    changes: dict[str, Any] = {"tasks": ("boolq",), "policies": ("knorm",), "budgets": (8,)}
    result, _ = recorded(config(folder, tmp_path / "run", data=str(file), **changes))
    assert result.rows["status"].tolist() == ["skipped", "skipped", "ok", "ok"]
    reason = result.rows["reason"].iloc[0]
    assert reason.startswith("prompt and answer take 100")
    assert reason.endswith("the model reads 8192")
    assert set(result.table["n_skipped"]) == {1}


def test_a_million_tokens_are_counted_and_skipped(opened: OpenModel, tmp_path: Path) -> None:
    row = {**GOOD["boolq"], "passage": "q" * 1_000_000}
    ((_, reason),) = built(opened, "boolq", tmp_path / "rows.jsonl", row).items
    assert isinstance(reason, str)
    assert reason.startswith("prompt and answer take 1000")


# Names


@FUZZ
@given(task=ANY_TEXT, model=ANY_TEXT)
def test_names_never_leave_the_results_folder(task: str, model: str) -> None:
    asked = RunConfig(("knorm",), (f"../../{task}",), (8,), model=f"../{model}")
    folder = runner._default_folder(asked)
    assert folder.parts[0] == "results"
    assert len(folder.parts) == 2
    assert ".." not in folder.parts
    assert len(folder.name.encode("utf-8", "surrogatepass")) < 256
    assert "\x00" not in folder.name


@FUZZ
@given(text=st.text(st.characters(exclude_categories=()), max_size=300))
def test_figure_names_are_plain_file_names(text: str) -> None:
    name = file_name(f"{text}-kl")
    assert "/" not in name
    assert name.isascii()
    assert len(name) < 200


def test_long_names_stay_apart() -> None:
    assert file_name("a" * 500 + "b") != file_name("a" * 500 + "c")


@pytest.mark.parametrize("name", ["../evil", "a/../../b", "/etc/x", "a\\b", "a\x00b", ".hidden"])
def test_plugins_cannot_register_a_path(name: str) -> None:
    with toy.added():
        with pytest.raises(PluginError, match="name"):
            register(name, source="s")(toy.Faulty)
        with pytest.raises(PluginError, match="name"):
            register_task(name, source="s")(toy.Toy)
        assert name not in [*POLICIES.names(), *TASKS.names()]


def test_what_an_output_cannot_show_is_escaped(tmp_path: Path) -> None:
    """A file name, a column or a label may hold half a surrogate pair; printing it must not fail."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"\\ud800": 1}\n')
    program = (
        "import sys; from kvbench.cli.main import main\n"
        "sys.argv = 'kvbench run --policy knorm --task boolq --budgets 8 --data'.split()\n"
        f"sys.argv.append({str(file)!r}); main()"
    )
    done = python(program)
    assert done.returncode == 2
    assert "columns there: \\ud800" in done.stderr
    assert "Traceback" not in done.stderr
