"""The row type: what is read is checked, older schemas are brought up to date, newer ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.contract.metrics import load_metrics
from kvbench.errors import StoreError
from kvbench.store import row as row_module
from kvbench.store import row_reader
from kvbench.store.columns import columns
from kvbench.store.results import ROWS, Store, read_rows, stored_rows
from tests.store.synthetic import row

FLAT = row("snapkv", 64).as_dict()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def stored(folder: Path, *lines: Any) -> Path:
    (folder / ROWS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


WRONG: dict[str, Any] = {
    "budget": 64.0, "chunk": "8", "seed": True, "pins": [0, 1, 2], "params": [], "spec": 7, "sample": None,
    "context_tokens": 2**63, "kept": "64", "metrics": {"kl": "low"}, "times": [1.0], "score_layers_s": [None],
    "gold_label": 1, "text": None,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_named_with_file_and_line(tmp_path: Path, name: str) -> None:
    stored(tmp_path, FLAT, {**FLAT, name: WRONG[name]})
    for use in (read_rows, stored_rows):
        with pytest.raises(StoreError, match=rf"rows.jsonl, line 2: {name} is .*: not a kvbench row"):
            use(tmp_path)


@pytest.mark.parametrize("name", ["config", "policy", "spec", "sample", "pins_mode", "seed"])
def test_a_field_without_a_default_must_be_there(tmp_path: Path, name: str) -> None:
    stored(tmp_path, {key: value for key, value in FLAT.items() if key != name})
    with pytest.raises(StoreError, match=f"line 1: {name} is missing"):
        read_rows(tmp_path)


@pytest.mark.parametrize("line", ["[" * 100_000, "[1]", '"key"', "{}", '{"key": 1}', "1" * 5000])
def test_json_that_is_no_row_is_one_message(tmp_path: Path, line: str) -> None:
    (tmp_path / ROWS).write_text(line + "\n")
    with pytest.raises(StoreError, match=r"rows.jsonl, line 1"):
        read_rows(tmp_path)


@settings(
    derandomize=True, deadline=None, max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(name=st.sampled_from([column.name for column in columns()]), value=JSON)
def test_any_value_in_any_field_is_read_or_refused(tmp_path: Path, name: str, value: Any) -> None:
    try:
        frame = read_rows(stored(tmp_path, {**FLAT, name: value}))
    except StoreError:
        return  # any other exception fails the test
    assert len(frame) == 1


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with Store.open(tmp_path, {}, {}) as store, pytest.raises(StoreError, match="kept is 'all'"):
        store.append([row("snapkv", 64, kept="all")])
    assert (tmp_path / ROWS).read_bytes() == b""


def test_a_field_of_the_future_is_refused(tmp_path: Path) -> None:
    """It may be an axis: rows that differ in it would be taken for equal."""
    with pytest.raises(StoreError, match="line 1: this kvbench does not know the fields spread: upgrade"):
        read_rows(stored(tmp_path, {**FLAT, "spread": "even"}))


def test_rows_of_the_schema_before_still_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if schema 2 had renamed a field: rows of schema 1 are read, those of 2 as they are, 3 is refused."""
    monkeypatch.setattr(row_module, "SCHEMA", 2)
    monkeypatch.setattr(row_reader, "SCHEMA", 2)
    old = {("remark" if name == "note" else name): value for name, value in FLAT.items()}

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        return {("note" if name == "remark" else name): value for name, value in values.items()}

    monkeypatch.setitem(row_reader.UPGRADES, 1, renamed)
    new = {**FLAT, "schema": 2, "key": "other", "note": "new"}
    frame = read_rows(stored(tmp_path, {**old, "remark": "old"}, new))
    assert frame["note"].tolist() == ["old", "new"]
    assert frame["schema"].tolist() == [2, 2]
    with pytest.raises(StoreError, match=r"line 1: row schema 3, but this kvbench reads up to 2: upgrade"):
        read_rows(stored(tmp_path, {**FLAT, "schema": 3}))


def test_equal_content_is_equal_whatever_an_older_kvbench_left_out(tmp_path: Path) -> None:
    """A row that lacks a field and one that has its default are the same row: nothing is written twice."""
    short = {name: value for name, value in FLAT.items() if name not in ("family", "reason", "peak")}
    with Store.open(tmp_path, {}, {}):
        pass
    stored(tmp_path, short)
    with Store.open(tmp_path, {}, {}) as store:
        store.append([row("snapkv", 64)])
    assert len((tmp_path / ROWS).read_text().splitlines()) == 1


@pytest.mark.parametrize("section", [{"m": 1}, {"m": {"name": "m"}}, {"m": {"unit": 1, "limits": 3}}])
def test_metrics_that_nobody_declared_so_are_one_message(section: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="metric 'm' of the manifest"):
        load_metrics(section)
