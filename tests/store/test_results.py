"""The run folder: nothing lost, nothing mixed, nothing half written."""

from __future__ import annotations

import errno
import gzip
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import StoreError
from kvbench.stats.aggregate import aggregate
from kvbench.store.manifest import MANIFEST
from kvbench.store.results import ROWS, TORN, Store, read_manifest, read_rows, stored_rows
from kvbench.store.row_files import PACKED, line_of
from tests.store.synthetic import row

FIXED = {"model": "m", "seed": 0, "pins": (4, 16)}
OLD = Path(__file__).parent / "data" / "schema1"
TEXTS = [
    "", "NA", "None", "null", "nan", 'a,b\n"c"', "tab\t nul\x00 del\x7f", "\u2028 \r\n",
    "日本 🙂", "\ud800 lone", "\udfff",
]  # fmt: skip


def open_store(folder: Path, **changes: Any) -> Store:
    return Store.open(folder, {**FIXED, **changes}, {})


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips_exactly(tmp_path: Path, text: str) -> None:
    with open_store(tmp_path) as store:
        store.append([row("snapkv", 64, sample=text, text=text, label=text, gold_label="NA")])
    frame = read_rows(tmp_path)
    assert list(frame["text"]) == list(frame["sample"]) == list(frame["label"]) == [text]
    assert list(frame["gold_label"]) == ["NA"]
    with open_store(tmp_path) as store:  # and is the same row when it comes again
        store.append([row("snapkv", 64, sample=text, text=text, label=text, gold_label="NA")])
    assert len((tmp_path / ROWS).read_bytes().splitlines()) == 1


HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # read back as the character they stand for
ANY = st.text(st.characters(exclude_categories=()), max_size=20).filter(lambda text: not HALVES.search(text))


@settings(derandomize=True, deadline=None, max_examples=30)
@given(text=ANY, label=st.none() | ANY, key=ANY, number=st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_and_any_number_round_trip(text: str, label: str | None, key: str, number: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given = row("snapkv", 64, sample=key, text=text, label=label, reason=text, metrics={"kl": number})
        with open_store(Path(folder)) as store:
            store.append([given])
        frame = read_rows(folder)
        read = frame.iloc[0]
        assert (read["text"], read["label"], read["sample"], read["reason"]) == (text, label, key, text)
        assert read["metric:kl"] == number
        with open_store(Path(folder)) as store:
            assert store.done == {given.key}


def test_columns_and_types(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append([row("full", None), row("snapkv", 64, params={"window": 32}, chunk=128)])
    frame = read_rows(tmp_path)
    assert frame["budget"].isna().tolist() == [True, False]
    assert frame["budget"].tolist()[1] == 64
    assert frame["metric:accuracy"].tolist() == [1.0, 1.0]
    assert frame["time:prefill_s"].tolist() == [0.5, 0.5]
    assert frame["pins"].tolist() == ["0,0", "0,32"]
    assert frame["params"].tolist() == ["{}", '{"window": 32}']


def test_done_leaves_failed_rows_to_be_tried_again(tmp_path: Path) -> None:
    rows = [
        row("knorm", 32, status="ok"),
        row("tova", 32, status="skipped"),
        row("snapkv", 32, status="failed"),
    ]
    with open_store(tmp_path) as store:
        store.append(rows)
        assert store.done == {rows[0].key, rows[1].key}
    with open_store(tmp_path) as store:
        assert store.done == {rows[0].key, rows[1].key}
        store.append([row("snapkv", 32, text="second try")])
        assert rows[2].key in store.done
    frame = read_rows(tmp_path)
    assert len(frame) == 3
    assert frame.set_index("spec").loc["snapkv", "text"] == "second try"


def test_same_row_is_ignored_another_one_refused(tmp_path: Path) -> None:
    first = row("snapkv", 64, times={"prefill_s": 1.0})
    with open_store(tmp_path) as store:
        store.append([first])
        before = (tmp_path / ROWS).read_bytes()
        store.append([replace(first, times={"prefill_s": 2.0})])
        fresh = row("knorm", 64)
        with pytest.raises(StoreError, match="other content"):
            store.append([fresh, replace(first, metrics={"accuracy": 0.0})])
        assert (tmp_path / ROWS).read_bytes() == before  # not even the fresh one of that sample
        assert fresh.key not in store.done


@pytest.mark.parametrize("tail", [b'{"key": "ab', b"\x00\x00\x00", b"{}"])
def test_torn_last_line_is_set_aside(tmp_path: Path, tail: bytes) -> None:
    kept = row("snapkv", 64)
    with open_store(tmp_path) as store:
        store.append([kept])
        assert store.notes == []
    with open(tmp_path / ROWS, "ab") as file:
        file.write(tail)
    assert len(read_rows(tmp_path)) == 1  # a reader is not disturbed
    with open_store(tmp_path) as store:
        assert store.done == {kept.key}
        assert len(store.notes) == 1
        assert "half written" in store.notes[0]
        store.append([row("knorm", 64)])
    assert (tmp_path / TORN).read_bytes() == tail + b"\n"
    assert len(read_rows(tmp_path)) == 2


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append([row("snapkv", 64)])
    with open(tmp_path / ROWS, "ab") as file:
        file.write(b"garbage\n" + line_of(row("knorm", 64)).encode() + b"\n")
    with pytest.raises(StoreError, match="line 2 is not JSON"):
        read_rows(tmp_path)
    with pytest.raises(StoreError, match="line 2 is not JSON"):
        open_store(tmp_path)


def test_killed_process_loses_only_the_sample_in_flight_and_frees_the_folder(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from kvbench.store.results import Store\n"
        "from tests.store.synthetic import row\n"
        f"store = Store.open(sys.argv[1], {FIXED!r}, {{}})\n"
        "store.append([row('snapkv', 64), row('knorm', 64)])\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(StoreError, match=r"in use by another run.*--out"):
            open_store(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with open_store(tmp_path) as store:
        assert len(store.done) == 2


def test_other_configuration_is_refused_field_by_field(tmp_path: Path) -> None:
    open_store(tmp_path, data={"sha256": "aa"}).close()
    open_store(tmp_path, data={"sha256": "aa"}).close()  # tuples and lists are the same to JSON
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path, seed=1, data={"sha256": "bb"})
    message = str(caught.value)
    assert 'data.sha256: "aa" there, "bb" asked; seed: 0 there, 1 asked' in message
    assert "model" not in message
    assert "--out" in message
    assert len(read_manifest(tmp_path)["runs"]) == 2


def test_manifest_says_how_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/bin/kvbench", "run", "--task", "a b"])
    Store.open(
        tmp_path, FIXED, {"style": {"knorm": {"color": "red"}}, "tasks": {"t": {"metric": "kl"}}}
    ).close()
    monkeypatch.setattr(sys, "argv", ["-c"])
    Store.open(tmp_path, FIXED, {"style": {"tova": {"color": None}}}).close()
    manifest = read_manifest(tmp_path)
    assert [run["command"] for run in manifest["runs"]] == ["kvbench run --task 'a b'", "python API"]
    assert list(manifest["style"]) == ["knorm", "tova"]
    assert manifest["tasks"] == {"t": {"metric": "kl"}}
    assert {"python", "torch", "transformers", "lm_eval", "kvbench", "commit"} == set(manifest["versions"])
    assert {"cpu", "cores", "memory", "platform"} == set(manifest["machine"])
    assert os.uname().nodename not in (tmp_path / "manifest.json").read_text().split('"')


def test_full_disk_leaves_no_row_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    store.append([row("snapkv", 64)])
    real = os.write

    def half(descriptor: int, data: Any) -> int:
        monkeypatch.setattr(os, "write", full)
        return real(descriptor, bytes(data)[: len(data) * 2 // 3])  # cuts the second of two rows

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(StoreError, match=r"No space left.*free space"):
        store.append([row("knorm", 64), row("tova", 64)])
    monkeypatch.setattr(os, "write", real)
    assert len(read_rows(tmp_path)) == 1
    store.append([row("knorm", 64)])  # space was freed
    store.close()
    assert read_rows(tmp_path)["spec"].tolist() == ["snapkv", "knorm"]
    with pytest.raises(StoreError, match="closed"):
        store.append([row("tova", 64)])


def test_unusable_folders_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write to .*--out"):
        open_store(tmp_path / "file" / "run")
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StoreError, match="kvbench run"):
            read_rows(folder)
    with pytest.raises(StoreError, match=r"no manifest.json"):
        read_manifest(tmp_path)
    (tmp_path / ROWS).write_text(line_of(row("knorm", 64)) + "\n")
    with pytest.raises(StoreError, match=r"has no manifest.json"):
        open_store(tmp_path)


def test_values_that_are_not_json_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, pytest.raises(StoreError, match="plain Python"):
        store.append([row("knorm", 64, metrics={"accuracy": object()})])
    assert (tmp_path / ROWS).read_bytes() == b""


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_text(line_of(row("knorm", 64, schema=2)) + "\n")
    with pytest.raises(StoreError, match=r"line 1: row schema 2.*upgrade"):
        read_rows(tmp_path)


def test_several_folders_are_read_as_one(tmp_path: Path) -> None:
    for name, budget in (("a", 32), ("b", 64)):
        with open_store(tmp_path / name) as store:
            store.append([row("knorm", budget), row("full", None)])
    frame = read_rows([tmp_path / "a", tmp_path / "b"])
    assert sorted(frame["budget"].dropna()) == [32, 64]
    assert (frame["spec"] == "full").sum() == 1


def test_old_results_still_load() -> None:
    """Written by the first release and never to be regenerated: published folders must stay readable."""
    frame = read_rows(OLD)
    assert read_manifest(OLD)["fixed"]["model"] == "smollm2-135m"
    assert frame["spec"].tolist() == ["full", "snapkv:window=64"]
    assert frame["budget"].tolist()[1] == 64
    assert frame["metric:accuracy"].tolist() == [1.0, 0.0]
    assert frame["text"].tolist() == ["NA", "\ud800 no"]


def test_a_packed_folder_reads_the_same_and_is_unpacked_to_go_on(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append([row("knorm", 64)])
    plain, (before, _) = read_rows(tmp_path), stored_rows(tmp_path)
    pack(tmp_path)
    pd.testing.assert_frame_equal(read_rows(tmp_path), plain)
    assert stored_rows(tmp_path) == (before, b"")
    with open_store(tmp_path) as store:
        assert store.done == {before[0].key}
        assert any("unpacked" in note for note in store.notes)
        store.append([row("knorm", 128)])
    assert not (tmp_path / PACKED).exists()
    assert [found.settings["budget"] for found in stored_rows(tmp_path)[0]] == [64, 128]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"?" * len(data)], ids=["cut", "other"]
)
def test_a_damaged_packed_file_is_named_and_kept(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    with open_store(tmp_path) as store:
        store.append([row("knorm", 64)])
    pack(tmp_path)
    broken = damage((tmp_path / PACKED).read_bytes())
    (tmp_path / PACKED).write_bytes(broken)
    for use in (read_rows, stored_rows, open_store):
        with pytest.raises(StoreError, match=r"rows.jsonl.gz is damaged"):
            use(tmp_path)
    assert (tmp_path / PACKED).read_bytes() == broken
    assert not (tmp_path / ROWS).exists()


def test_packed_rows_need_their_manifest_and_plain_rows_come_first(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.append([row("knorm", 64)])
    pack(tmp_path)
    (tmp_path / ROWS).write_text(line_of(row("knorm", 128)) + "\n")
    assert read_rows(tmp_path)["budget"].tolist() == [128]
    (tmp_path / ROWS).unlink()
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(StoreError, match=r"has no manifest.json"):
        open_store(tmp_path)


def pack(folder: Path) -> None:
    (folder / PACKED).write_bytes(gzip.compress((folder / ROWS).read_bytes(), mtime=0))
    (folder / ROWS).unlink()


def test_rows_of_one_key_belong_to_both_rules_of_pins(tmp_path: Path) -> None:
    """KVP's own pins are 4,16: under both rules it is the same measurement, and both tables have it."""
    folders = []
    for rule in ("native", "4,16"):
        rows = [row("kvp", 32, f"s{index}", pins=[4, 16], pins_mode=rule) for index in range(3)]
        folders.append(tmp_path / rule)
        with Store.open(folders[-1], {}, {}) as store:
            store.append(rows)
    frame = read_rows(folders)
    assert frame["key"].nunique() == 3
    assert frame["pins_mode"].tolist() == ["native"] * 3 + ["4,16"] * 3
    lines = aggregate(frame, ["accuracy"])
    assert lines["pins_mode"].tolist() == ["4,16", "native"]
    assert lines["n"].tolist() == [3, 3]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("kvbench.store.results.fcntl.flock", refuse)
    with pytest.raises(StoreError, match="cannot lock") as caught:
        open_store(tmp_path)
    assert "space" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES])
def test_only_a_full_disk_asks_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    store = open_store(tmp_path)
    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(StoreError, match="cannot write") as caught:
        store.append([row("knorm", 64)])
    assert "space" not in str(caught.value)
