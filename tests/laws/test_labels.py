"""Labels belong to the question that was asked: what two rules of pins give alike is there under both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import kvbench
from kvbench.audit.verify import verify
from kvbench.cli import main as cli
from kvbench.errors import StoreError
from kvbench.show.table import render
from kvbench.stats.aggregate import aggregate
from kvbench.stats.compare import compare
from kvbench.stats.panels import shorten, split_panels
from kvbench.store.results import Store, read_rows
from tests.laws import toy
from tests.laws.runs import config
from tests.store.synthetic import row

POLICIES = ("snapkv:window=4", "streaming_llm", "knorm", "random")


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("order", [("native", "none"), ("none", "native"), ("native", "0,4")])
def test_both_questions_show_every_policy(folder: str, tmp_path: Path, order: tuple[str, str]) -> None:
    """Native pins of two of these are none, those of another are 0,4: rows that have one key."""
    results = []
    for pins in order:
        asked = config(folder, tmp_path, policies=POLICIES, tasks=("laws_toy",), pins=pins, limit=2)
        results.append(kvbench.run(asked, progress=False))
        assert set(results[-1].rows["spec"]) == {"full", *POLICIES}
        assert set(results[-1].rows["pins_mode"]) <= {pins, "none"}
        assert len(results[-1].rows) == 2 * (1 + 2 * len(POLICIES))
        assert results[-1].computed + results[-1].reused == len(results[-1].rows)
    assert results[1].reused > 2  # not only the full cache
    written = (tmp_path / "rows.jsonl").read_bytes()
    kvbench.run(asked, progress=False)
    assert (tmp_path / "rows.jsonl").read_bytes() == written
    rows = read_rows(tmp_path)
    for setting, lines in split_panels(aggregate(rows, ["accuracy"])):
        assert setting["pins_mode"] in order
        assert set(lines["label"]) == {"full", *POLICIES}
    compared = compare(rows, metrics=["accuracy"])
    assert compared.groupby("pins_mode")["policy"].agg(set).to_dict() == {
        pins: set(POLICIES) for pins in order
    }
    assert all(finding.passed for finding in verify([tmp_path]))


@pytest.mark.usefixtures("toys")
def test_a_folder_with_both_questions_comes_again(folder: str, tmp_path: Path) -> None:
    """Also one of before there were copies, where the first question has the row."""
    out = tmp_path / "run"
    for pins in ("native", "none"):
        asked = config(folder, out, policies=("knorm", "tova"), tasks=("laws_toy",), pins=pins, limit=1)
        kvbench.run(asked, progress=False)
    done = CliRunner().invoke(cli.app, ["rerun", str(out)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    once = list({one["key"]: one for one in reversed(lines)}.values())
    (out / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reversed(once)))
    done = CliRunner().invoke(cli.app, ["rerun", str(out)])
    assert done.exit_code == 0, done.output


def test_what_a_script_registered_is_named(folder: str, tmp_path: Path) -> None:
    """Another process has no such task: `rerun` says where it came from, and works where it is registered."""
    with toy.added():
        asked = config(folder, tmp_path, policies=("knorm",), tasks=("laws_toy",), limit=1)
        kvbench.run(asked, progress=False)
        assert CliRunner().invoke(cli.app, ["rerun", str(tmp_path)]).exit_code == 0
    done = CliRunner().invoke(cli.app, ["rerun", str(tmp_path)])
    assert done.exit_code == cli.REFUSED
    assert "task 'laws_toy'" in done.stderr
    assert "module tests.laws.toy" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_row_is_stored_once_for_each_rule(tmp_path: Path) -> None:
    bad, good = (row("knorm", 64, status=status, reason="x") for status in ("failed", "ok"))
    other = row("knorm", 64, pins_mode="none", reason="x")
    with Store.open(tmp_path, {}, {}) as store:
        store.append([bad])
        store.append([bad])
        store.append([other])
        store.label({good.key: "native", "nobody": "native"})
        store.label({good.key: "native"})
        store.append([other, good])
        with pytest.raises(StoreError, match="other content"):
            store.append([row("knorm", 64, pins_mode="4,4", text="another")])
    frame = read_rows(tmp_path)
    assert frame[["pins_mode", "status"]].to_numpy().tolist() == [["native", "ok"], ["none", "ok"]]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def _two_files(folder: Path, names: tuple[str, str]) -> pd.DataFrame:
    with Store.open(folder, {}, {}) as store:
        for hashed, name in zip("ab", names, strict=True):
            for spec, budget in (("full", None), ("knorm", 64)):
                made = row(spec, budget, data=f"file {name}", metrics={"accuracy": float(hashed == "a")})
                store.append([replace(made, key=f"{hashed} {spec}", config=f"{hashed} {spec}")])
    return aggregate(read_rows(folder), ["accuracy"])


def test_data_files_are_told_apart_by_name(tmp_path: Path) -> None:
    lines = _two_files(tmp_path / "a", ("b.jsonl", "d.jsonl"))
    ((_, panel),) = split_panels(lines)
    assert set(panel["label"]) == {
        "full (b.jsonl)", "full (d.jsonl)", "knorm (b.jsonl)", "knorm (d.jsonl)",
    }  # fmt: skip
    assert "full (b.jsonl)" in render(lines)
    ((_, alike),) = split_panels(_two_files(tmp_path / "b", ("b.jsonl", "b.jsonl")))
    assert alike["label"].nunique() == 4


def test_two_files_of_one_name_are_two_policies(tmp_path: Path) -> None:
    one, other = "kvp:weights=a/w.safetensors", "kvp:weights=b/w.safetensors"
    with Store.open(tmp_path, {}, {}) as store:
        for sample in ("s0", "s1"):
            for spec in ("full", one, other, "kvp:weights=c/v.safetensors"):
                store.append([row(spec, None if spec == "full" else 64, sample)])
    text = CliRunner().invoke(cli.app, ["table", str(tmp_path)]).stdout
    for name in ("kvp:weights=w (a/w.safetensors)", "kvp:weights=w (b/w.safetensors)", " kvp:weights=v "):
        assert name in text
    for name in (one, "kvp:weights=w (a/w.safetensors)", "kvp:weights=v"):
        done = CliRunner().invoke(cli.app, ["compare", str(tmp_path), "--baseline", name])
        assert done.exit_code == 0, done.stderr
        assert "kvp:weights=w (b/w.safetensors)" in done.stdout
    vague = CliRunner().invoke(cli.app, ["compare", str(tmp_path), "--baseline", "kvp:weights=w"])
    assert vague.exit_code == cli.REFUSED
    assert one in vague.stderr
    assert other in vague.stderr


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("snapkv:window=64", "snapkv:window=64"),
        ("kvp:weights=a/w.safetensors,pins=none", "kvp:weights=w,pins=none"),
        ("kvp:weights=a/w.safetensors (results/mine)", "kvp:weights=w (results/mine)"),
        ("full (b.jsonl)", "full (b.jsonl)"),
    ],
)
def test_a_label_is_shown_short(label: str, shown: str) -> None:
    assert shorten(label) == shown
