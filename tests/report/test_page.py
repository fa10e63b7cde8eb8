"""The page: whole, alone, safe, usable without eyes or a mouse, and made of the stored numbers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbench.audit.verify import verify
from kvbench.cli import main as cli
from kvbench.contract.metrics import METRICS
from kvbench.errors import BadInput, StoreError
from kvbench.show.panel import build_panels, read_declarations
from kvbench.show.report import report
from kvbench.show.report.best import best_of
from kvbench.show.report.numbers import read_lines
from kvbench.show.report.page import render
from kvbench.show.words import number
from kvbench.stats.aggregate import aggregate
from kvbench.store.results import read_rows
from tests.report.made import HOSTILE, STYLE, Seen, make_rows, make_run, row, seen
from tests.store.synthetic import BUDGETS, POLICIES


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "mine", samples=12)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is drawn in no time."""
    rows = [
        row(spec, budget, f"s{index}", metrics={"accuracy": float(index > place), "kl": 0.1 * index + place})
        for place, spec in enumerate(("knorm", "tova", "oracle"))
        for budget in (32, 64)
        for index in range(4)
    ]
    return make_rows(tmp_path_factory.mktemp("runs") / "small", rows)


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return render([run])


@pytest.fixture(scope="module")
def parsed(page: str) -> Seen:
    return seen(page)


def test_nothing_is_loaded_from_anywhere(page: str, parsed: Seen) -> None:
    for element in parsed.elements:
        assert element.tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), element
        for name, value in element.attributes.items():
            assert name not in ("src", "srcset", "action", "data", "xlink:href", "background"), element
            assert name != "href" or value.startswith("#"), element
            assert not name.startswith("on"), element
            assert "url(" not in value, element
    (style,) = parsed.all("style")
    assert not re.search(r"url\(|@import|https?:", style.text)


def test_only_its_own_script_may_run(parsed: Seen) -> None:
    data, script = parsed.all("script")
    assert data.attributes == {"type": "application/json", "id": "numbers"}
    (policy,) = (e for e in parsed.all("meta") if "http-equiv" in e.attributes)
    digest = b64encode(sha256(script.text.encode()).digest()).decode()
    assert policy.attributes["content"] == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_ids_labels_and_references_fit(parsed: Seen) -> None:
    ids = [e.attributes["id"] for e in parsed.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids)) > 50
    for element in parsed.elements:
        for name in ("for", "aria-labelledby", "aria-describedby"):
            for ident in element.attributes.get(name, "").split():
                assert ident in ids, element
        if element.attributes.get("href"):
            assert element.attributes["href"][1:] in ids, element
    labelled = {e.attributes["for"] for e in parsed.all("label")}
    inputs = parsed.all("input")
    assert {e.attributes["id"] for e in inputs} == labelled
    assert {e.attributes["type"] for e in inputs} == {"checkbox", "radio"}


def test_structure_for_those_who_listen(parsed: Seen) -> None:
    assert [e.tag for e in parsed.all("header", "nav", "main", "footer")] == [
        "header",
        "nav",
        "main",
        "footer",
    ]
    levels = [int(e.tag[1]) for e in parsed.all("h1", "h2", "h3", "h4", "h5", "h6")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))
    assert parsed.all("html")[0].attributes["lang"] == "en"
    for table in parsed.all("table"):
        assert table.inside[-1] == "div"  # a box of its own that scrolls
    assert len(parsed.all("caption")) == len(parsed.all("table")) > 10
    assert all(e.attributes.get("scope") in ("row", "col") for e in parsed.all("th"))
    for box in (e for e in parsed.all("div") if e.attributes.get("class") == "box"):
        assert box.attributes["tabindex"] == "0"
        assert box.attributes["role"] == "region"
        assert box.attributes["aria-label"]
    for svg in parsed.all("svg"):
        assert (svg.attributes.get("role") == "img") != ("aria-hidden" in svg.attributes)
        assert "aria-labelledby" in svg.attributes or "aria-hidden" in svg.attributes
    assert all(e.text.strip() for e in parsed.all("button", "label", "a", "summary", "legend"))


def test_every_policy_has_a_toggle_and_a_curve(page: str, parsed: Seen) -> None:
    boxes = [e for e in parsed.all("input") if e.attributes["type"] == "checkbox"]
    own = [e for e in boxes if "data-curve" in e.attributes]
    assert len(own) == 2 * (len(POLICIES) + 1)  # two tasks; and the full cache
    assert all("checked" in e.attributes for e in boxes)
    charts = [e for e in parsed.all("svg") if "chart curves" in e.attributes.get("class", "")]
    assert len(charts) >= 2 * 4
    for box in own:
        key = box.attributes["class"][1:]
        assert f".panel:has(.t{key}:not(:checked)) .chart .k{key} " in page
        assert sum(e.attributes.get("class") == f"c k{key}" for e in parsed.all("g")) >= 2 * 2


def test_the_tables_say_what_the_aggregates_say(run: Path, parsed: Seen) -> None:
    lines = aggregate(read_rows(run), ["accuracy"])
    (table,) = (e for e in parsed.all("table") if "boolq: accuracy, mean" in e.text)
    for policy in POLICIES:
        for budget in BUDGETS:
            (line,) = lines[(lines["policy"] == policy) & (lines["budget"] == budget)].to_dict("records")
            mean, low, high = (number(line[name], METRICS["accuracy"]) for name in ("mean", "lo", "hi"))
            assert f"{mean} [{low},{high}]" in table.text


def test_the_numbers_inside_are_the_aggregates(run: Path, page: str) -> None:
    lines, whole = read_lines(page)
    assert whole
    frame = aggregate(read_rows(run))
    assert len(lines) == len(frame) > 100
    for line, there in zip(lines, frame.to_dict("records"), strict=True):
        assert (line["config"], line["metric"], line["mean"], line["n"]) == (
            there["config"], there["metric"], there["mean"], there["n"]
        )  # fmt: skip


def test_equal_rows_give_equal_bytes(small: Path, tmp_path: Path) -> None:
    again = shutil.copytree(small, tmp_path / "elsewhere" / "small")
    first, second = report(again), report(str(small), tmp_path / "deep" / "page.html")
    assert first == again / "report.html"
    assert first.read_bytes() == second.read_bytes()
    page = first.read_text(encoding="utf-8")
    assert str(tmp_path) not in page


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    rows = [
        row(
            spec,
            budget,
            f"s{index}",
            task_spec=HOSTILE,
            reason=HOSTILE + "\ud800",
            status=status,
            text=HOSTILE,
        )
        for spec in (HOSTILE, "tova", "full")
        for budget in ((None,) if spec == "full" else (32, 64))
        for index, status in enumerate(("ok", "ok", "ok", "failed"))
    ]
    style = {**STYLE, HOSTILE: {"color": "red", "dashed": False, "bracket": None}}
    run = make_rows(
        tmp_path / "<script>alert(3)<",
        rows,
        style=style,
        data={HOSTILE: {"task": HOSTILE, "source": HOSTILE}},
    )
    found = seen(report(run).read_text(encoding="utf-8"))
    assert len(found.all("script")) == 2
    assert not found.all("img")
    assert not [e for e in found.elements if any(name.startswith("on") for name in e.attributes)]
    assert HOSTILE in found.by_id("p1-h").text
    assert HOSTILE in found.by_id("sources").text
    assert json.loads(found.by_id("numbers").text)[0]["task"] == HOSTILE


def test_verify_knows_a_page(small: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(small, tmp_path / "mine"))
    file = report(mine)
    law = f"{file} says what the rows say"
    assert {f.law: f.passed for f in verify([mine])}[law]
    text = file.read_text()
    lines, _ = read_lines(text)
    file.write_text(text.replace(f'"mean": {json.dumps(lines[3]["mean"])}', '"mean": 0.123', 1))
    (fault,) = (f for f in verify([mine]) if f.law == law)
    assert not fault.passed
    assert "its numbers are not those" in fault.detail
    file.write_text(text)
    rows = (mine / "rows.jsonl").read_text()
    (mine / "rows.jsonl").write_text(rows.replace('"accuracy":0.0', '"accuracy":1.0', 1))
    (fault,) = (f for f in verify([mine]) if f.law == law)
    assert not fault.passed
    assert "in the rows" in fault.detail
    file.write_text("<p>something else</p>")
    (fault,) = (f for f in verify([mine]) if f.law == law)
    assert "not a page of kvbench" in fault.detail
    with pytest.raises(BadInput, match="make one with kvbench report"):
        read_lines("")


def test_the_command_and_its_refusals(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = CliRunner().invoke(cli.app, ["report", str(small), "--out", str(file)])
    assert done.exit_code == 0
    assert done.stdout.strip() == str(file)
    with pytest.raises(StoreError, match="is a folder: name a file"):
        report(small, tmp_path)
    with pytest.raises(StoreError, match="no rows"):
        report(tmp_path / "nothing")
    with pytest.raises(StoreError, match="choose another --out"):
        report(small, file / "below" / "a.html")
    bad = make_rows(tmp_path / "bad", [row("tova", 32, status="failed", reason="broke", metrics={})])
    with pytest.raises(StoreError, match="no usable rows"):
        report(bad)


def test_neither_torch_nor_the_engine_is_imported(small: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from kvbench.show.report import report\n"
        f"report({str(small)!r}, {str(tmp_path / 'page.html')!r})\n"
        "bad = {'torch', 'transformers', 'lm_eval', 'matplotlib.pyplot', 'kvbench.engine', 'kvbench.study'}\n"
        "assert not bad & set(sys.modules), bad & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_without_a_full_cache_or_a_manifest(small: Path, tmp_path: Path) -> None:
    rows = [
        row(
            spec,
            64,
            f"t{index}",
            task_spec="traces",
            metrics={"eviction_cost": 1.0 + index, "missed_mass": 0.1 * index},
        )
        for spec in ("knorm", "tova", "oracle")
        for index in range(4)
    ]
    made = make_rows(tmp_path / "traces", rows)
    (made / "manifest.json").unlink()
    found = seen(render([made]))
    assert "no policy stands out" in found.by_id("p1").text
    assert "With n = 4 no test could." in found.by_id("p1").text
    assert "kvbench rerun" not in found.by_id("sources").text
    assert seen(render([made, small])).by_id("p2")  # bare rows beside a run


def test_a_metric_that_a_plugin_declared_is_known_from_the_manifest(tmp_path: Path) -> None:
    """Its direction decides who is best, its limits the axis; the plugin is not loaded here."""
    declared = {"name": "slips", "unit": "0..1", "description": "d", "better": "lower", "limits": [0.0, 1.0]}
    rows = [
        row(spec, 64, f"s{index}", metrics={"slips": value})
        for spec, value in (("knorm", 0.0), ("tova", 1.0))
        for index in range(8)
    ]
    tasks = {"boolq": {"metric": "slips"}}
    folder = make_rows(tmp_path / "run", rows, tasks=tasks, metrics={"slips": declared})
    (panel,), _ = build_panels(read_rows(folder), read_declarations([folder]))
    assert panel.about("slips").better == "lower"
    assert panel.pairs("slips")[["policy", "win", "loss"]].to_numpy().tolist() == [["knorm", 8, 0]]
    assert panel.pairs("slips")["unit"].tolist() == ["0..1"]
    (best,) = best_of(panel, "slips")
    assert best.leaders == ("knorm",)
    assert "slips (0..1, lower is better)" in render([folder])
    assert "slips" not in METRICS


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    rows = [row(spec, 64, f"s{index}") for spec in ("knorm", "tova") for index in range(3)]
    rows[4] = replace(rows[4], status="failed", reason="out of memory", metrics={})
    text = " ".join(seen(render([make_rows(tmp_path / "run", rows)])).by_id("sources").text.split())
    assert "failed: out of memory" in text
    assert "6, 1 failed" in text
