"""Tables say the number, its uncertainty, and what to know before believing it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest

from kvbench.errors import BadInput
from kvbench.show.comparison_table import render_comparison
from kvbench.show.table import headline, render
from kvbench.stats.aggregate import aggregate
from kvbench.stats.compare import compare
from kvbench.store.results import Row, Store, read_rows
from tests.store.synthetic import TASKS, make_run, row


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return aggregate(read_rows(make_run(tmp_path_factory.mktemp("run"), samples=12)))


def test_json_has_the_promised_keys(frame: pd.DataFrame) -> None:
    objects = json.loads(render(frame, "json"), parse_constant=lambda text: pytest.fail(text))
    assert len(objects) == len(frame)
    assert all(
        {"task", "policy", "budget", "metric", "mean", "lo", "hi", "n"} <= set(item) for item in objects
    )
    assert {item["budget"] for item in objects if item["policy"] == "full"} == {None}
    first = next(item for item in objects if item["policy"] == "snapkv")
    assert (first["budget"], first["n"], first["pins"]) == (32, 12, [0, 32])
    assert json.loads(render(frame.iloc[:0], "json")) == []


def test_csv_is_the_long_form(frame: pd.DataFrame) -> None:
    back = pd.read_csv(io.StringIO(render(frame, "csv")), keep_default_na=False)
    assert list(back.columns) == list(frame.columns)
    assert back["mean"].astype(float).tolist() == frame["mean"].tolist()


def test_markdown_shows_full_first_and_a_column_per_budget(frame: pd.DataFrame) -> None:
    text = render(frame, "md", TASKS)
    blocks = [line for line in text.splitlines() if line.startswith("### ")]
    assert blocks[0].startswith("### boolq: accuracy (0..1, higher is better), n = 12")
    assert any(line.startswith("### needle:length=512: string match") for line in blocks)
    assert not any("kv bytes" in line for line in blocks)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0] == "| policy | full cache | 32 | 64 | 128 | 256 | 512 |"
    assert table[2].startswith("| full | ")
    order = [line.split(" | ")[0][2:] for line in table[2:10]]
    assert order == [
        "full", "random", "streaming_llm", "knorm", "snapkv", "snapkv:window=64", "tova", "oracle",
    ]  # fmt: skip
    found = frame[(frame["task"] == "boolq") & (frame["policy"] == "tova") & (frame["budget"] == 64)]
    number = found[found["metric"] == "accuracy"].iloc[0]
    assert f"{number['mean']:.2f} [{number['lo']:.2f},{number['hi']:.2f}]" in text


def test_footnotes(tmp_path: Path) -> None:
    rows = [row("full", None, f"s{i}", gold_label="1", label="1") for i in range(3)]
    rows += [row("streaming_llm", b, f"s{i}", pins=[4, 16]) for b in (20, 64) for i in range(3)]
    rows += [row("knorm", b, f"s{i}", evicted_layers=4, layers=30) for b in (20, 64) for i in range(2)]
    rows += [row("knorm", 64, "s2", status="failed", reason="boom"), row("tova", 20, status="skipped")]
    with Store.open(tmp_path, {}, {}) as store:
        store.append(rows)
    only_main = headline(aggregate(read_rows(tmp_path)), {"boolq": {"metric": "accuracy"}})
    text = render(only_main, "text", {"boolq": {"metric": "accuracy"}})
    assert "decides nothing: streaming_llm at 20 (pins 4+16)." in text
    assert "knorm at 64: failed: boom (1)" in text
    assert "tova at 20: skipped: no reason given (1)" in text
    assert "Budgets hold in 4 of 30 layers" in text
    assert "always answering '1', the most common label, scores 1.00" in text
    assert "n differs: 2 to 3" in text
    assert "1.00 [0.34,1.00] n=2" in " ".join(text.split())


def test_headline_takes_each_tasks_main_metric(frame: pd.DataFrame) -> None:
    found = headline(frame, TASKS)
    pairs = set(zip(found["task"], found["metric"], strict=True))
    assert pairs == {("boolq", "accuracy"), ("needle:length=512", "string_match")}
    assert set(headline(frame, {"boolq": {"metric": "kl"}})["metric"]) == {"kl", "string_match"}


def test_unknown_format_lists_the_known(frame: pd.DataFrame) -> None:
    with pytest.raises(BadInput, match="text, md, csv, json"):
        render(frame, "xml")


@pytest.mark.parametrize("text", ["NA", "null", "[bold]", ":smile:", "a|b"])
def test_names_are_printed_as_they_are(tmp_path: Path, text: str) -> None:
    with Store.open(tmp_path, {}, {}) as store:
        store.append([row("knorm", 64, task=text, task_spec=text)])
    found = aggregate(read_rows(tmp_path))
    assert render(found, "text").startswith(f"{text}: ")
    assert {item["task"] for item in json.loads(render(found, "json"))} == {text}


def test_a_narrow_terminal_cuts_no_number(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    wide = render(frame, "text").split()
    monkeypatch.setenv("COLUMNS", "40")
    narrow = render(frame, "text")
    assert "…" not in narrow
    cells = [word for word in wide if word.startswith("[0.") or word.startswith("[1.")]
    assert cells
    assert sorted(cells) == sorted(word for word in narrow.split() if word.startswith(("[0.", "[1.")))


def test_any_text_may_be_a_reason(tmp_path: Path) -> None:
    """Half a surrogate pair, too, which pandas groups by no more."""
    bad = [row("tova", budget, status="failed", reason="bad \ud800", metrics={}) for budget in (32, 64)]
    with Store.open(tmp_path / "run", {}, {}) as store:
        store.append([row("knorm", 32), *bad])
    text = render(aggregate(read_rows(tmp_path / "run")))
    assert "tova at 32, 64: failed: bad \ud800 (1)" in text


def _written(spec: str, budget: int | None, sample: str, text: str, agreement: float | None) -> Row:
    metrics = {"string_match": 0.0} | ({} if agreement is None else {"agreement": agreement})
    return row(spec, budget, sample, task="needle", task_spec="needle", text=text, metrics=metrics)


def test_empty_answers_are_counted(tmp_path: Path) -> None:
    """Two of them agree, which nobody would see from an agreement of 1."""
    with Store.open(tmp_path, {}, {"tasks": {"needle": {"metric": "string_match"}}}) as store:
        for name in ("s0", "s1", "s2"):
            blank = "" if name == "s0" else " \n" if name == "s1" else "word"
            store.append([_written("full", None, name, blank, None), _written("knorm", 64, name, blank, 1.0)])
            store.append([_written("tova", 64, name, "word", 0.0)])
            store.append([row("full", None, name, text="", label="yes", metrics={"accuracy": 1.0})])
            choice = {"accuracy": 1.0, "agreement": 1.0}  # text is no answer of a task with choices
            store.append([row("knorm", 64, name, text="", label="yes", metrics=choice)])
            read = {"nll": 1.0, "nll_tokens": 3.0}  # nor of one that only reads a text
            store.append([row("full", None, name, task="ppl", task_spec="ppl", text="", metrics=read)])
    rows = read_rows(tmp_path)
    lines = aggregate(rows)
    counts = lines.drop_duplicates(["task", "policy"]).set_index(["task", "policy"])["n_empty"]
    assert counts["needle", "full"] == counts["needle", "knorm"] == 2
    assert counts.sum() == 4
    note = "Empty answers, two of which agree: full: 2 of 3 samples; knorm at 64: 2 of 3 samples."
    assert note in render(lines)
    compared = compare(rows, metrics=["agreement", "string_match"], baseline="tova")
    assert compared["n_empty"].tolist() == [2, 2]
    assert "Empty answers, two of which agree: knorm at 64: 2 of 3 samples." in render_comparison(compared)
