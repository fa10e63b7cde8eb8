"""Figures: every curve is there, looks the same everywhere, and comes from stored results alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvbench.contract import metrics
from kvbench.contract.metrics import METRICS, Metric
from kvbench.errors import UnknownName
from kvbench.show.chart import chart_of
from kvbench.show.curves import FAINT
from kvbench.show.plot import draw_figure, plot
from kvbench.show.style import GREY, assign_styles
from kvbench.show.table import render
from kvbench.stats.aggregate import aggregate
from kvbench.stats.compare import compare_pairs
from kvbench.stats.panels import split_panels
from kvbench.store.frame import metrics_of
from kvbench.store.results import Store, read_rows
from tests.store.synthetic import BUDGETS, POLICIES, STYLE, make_run, row


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), samples=6)


def draw(rows: pd.DataFrame, metric: str, panel: int = 0) -> Figure:
    _, lines = split_panels(aggregate(rows, [metric]))[panel]
    chart = chart_of(lines[lines["n"] > 0], assign_styles([*POLICIES, "full"], STYLE))
    return draw_figure(chart, ["a heading"])


def test_every_policy_has_its_curve(run: Path) -> None:
    rows = read_rows(run)
    fig = draw(rows, "accuracy")
    (axes,) = fig.axes
    curves = {line.get_gid(): line for line in axes.get_lines() if line.get_gid()}
    assert set(curves) == set(POLICIES)
    assert all(list(line.get_xdata()) == list(BUDGETS) for line in curves.values())
    mean = aggregate(rows, ["accuracy"]).query("task == 'boolq' and policy == 'tova'")["mean"]
    assert list(curves["tova"].get_ydata()) == mean.tolist()
    assert [curves[name].get_linestyle() for name in ("knorm", "snapkv", "random", "oracle")] == [
        "-", "--", ":", "-.",
    ]  # fmt: skip
    assert curves["random"].get_color() == curves["oracle"].get_color() == GREY
    plain = [curves[name] for name in POLICIES if name not in ("random", "oracle")]
    assert len({to_hex(line.get_color()) for line in plain}) == len(plain)
    assert len({line.get_marker() for line in plain}) == len(plain)
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(budget) for budget in BUDGETS]
    assert axes.get_xlabel() == "budget (KV pairs per KV head per layer)"
    assert axes.get_ylabel() == "accuracy (0..1, higher is better)"
    names = [text.get_text() for text in fig.legends[0].get_texts()]
    assert names[:2] == ["full cache (≈1003 pairs)", "oracle (bracket)"]
    assert any(name.startswith("majority rate 0.") for name in names)


def test_majority_rate_is_only_drawn_where_it_can_be_compared(run: Path) -> None:
    names = [text.get_text() for text in draw(read_rows(run), "kl").legends[0].get_texts()]
    assert not any("majority" in name for name in names)


def test_files_are_named_by_task_and_metric_and_are_deterministic(run: Path, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    files = plot(run, "accuracy")
    assert files == [run / "figures" / f"boolq-accuracy.{end}" for end in ("png", "svg", "csv")]
    again = plot(run, "accuracy", out=tmp_path / "again")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]
    assert b"<dc:date>" not in files[1].read_bytes()
    assert dict(matplotlib.rcParams) == before
    several = plot(run, "accuracy,kl", out=tmp_path / "several", workers=2)  # in processes of their own
    assert several[:3] == [tmp_path / "several" / file.name for file in files]
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in several[:3]]


def test_a_figure_looks_the_same_under_any_global_settings(run: Path, tmp_path: Path) -> None:
    files = plot(run, "kl", out=tmp_path / "plain")
    own = {"font.size": 7, "font.family": "serif", "axes.spines.top": False, "svg.fonttype": "none"}
    with matplotlib.rc_context(own):
        again = plot(run, "kl", out=tmp_path / "changed")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]


def test_without_a_metric_the_main_one_and_those_beside_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.show.plot.save", lambda fig, folder, name, lines: [folder / f"{name}.svg"])
    found = {file.name for file in plot(run, out=tmp_path)}
    beside = ("agreement", "kl", "missed_mass", "eviction_cost")
    assert found == {f"boolq-{name}.svg" for name in ("accuracy", *beside)} | {
        f"needle_length=512-{name}.svg" for name in ("string_match", *beside)
    }


def test_unknown_metric_lists_those_of_the_run(run: Path) -> None:
    with pytest.raises(UnknownName, match=r"not measured here|Known: .*accuracy") as caught:
        plot(run, "acc_norm")
    assert "string_match" in str(caught.value)


def test_settings_of_one_task_get_a_figure_each(tmp_path: Path) -> None:
    rows = [row("knorm", 64), row("knorm", 64, question="seen"), row("full", None, question="seen")]
    with Store.open(tmp_path, {}, {}) as store:
        store.append(rows)
    names = [file.name for file in plot(tmp_path, "accuracy")]
    assert names[::3] == ["boolq-question=seen-accuracy.png", "boolq-question=withheld-accuracy.png"]


def test_a_stored_metric_keeps_its_unit_and_its_name_becomes_a_file(tmp_path: Path) -> None:
    """lm-eval's metrics of several filters have a slash; their task is not loaded here."""
    name = "exact/strict"
    told = {"name": name, "unit": "0..1", "description": "d", "better": "lower", "limits": [0.0, 1.0]}
    with Store.open(tmp_path, {}, {"metrics": {name: told}}) as store:
        store.append([row("knorm", 64, metrics={name: 0.5}), row("full", None, metrics={name: 0.2})])
    rows = read_rows(tmp_path)
    assert metrics_of(rows) == {name: Metric(name, "0..1", "d", "lower")}
    lines = aggregate(rows, [name])
    assert (lines["unit"][0], metrics_of(lines)) == ("0..1", metrics_of(rows))
    assert "lower is better" in render(lines)
    assert "0.50" in render(lines)  # in the precision of its unit
    assert compare_pairs(rows, "full", name)["loss"].tolist() == [1]
    assert plot(tmp_path, name)[0].name == "boolq-exact_strict.png"
    assert name not in METRICS  # reading changes nothing that another run would see
    assert name not in metrics.dump_metrics()


@pytest.mark.parametrize("budgets", [(), (64,), (64, 66, 512)])
@pytest.mark.parametrize("samples", [1, 3])
def test_small_runs_can_be_drawn(tmp_path: Path, budgets: tuple[int, ...], samples: int) -> None:
    with Store.open(tmp_path, {}, {}) as store:
        for index in range(samples):
            store.append([row("full", None, f"s{index}"), *(row("knorm", b, f"s{index}") for b in budgets)])
    fig = draw(read_rows(tmp_path), "accuracy")
    fig.draw_without_rendering()
    labels = [text.get_text() for text in fig.axes[0].get_xticklabels()]
    assert labels == {(): [], (64,): ["64"], (64, 66, 512): ["64", "", "512"]}[budgets]


def test_a_policy_looks_the_same_whatever_else_was_run() -> None:
    few, many = (
        assign_styles(["kvp", "knorm"], {}),
        assign_styles(["knorm", "kvp", "random"], {"random": {"bracket": "lower"}}),
    )
    assert few == {name: many[name] for name in few}
    declared = {"kvp": {"color": "crimson"}, "kvp:lr=1": {"color": "crimson"}}
    found = assign_styles(["kvp:lr=1", "kvp"], declared)
    assert found["kvp"].color == "crimson"
    assert found["kvp:lr=1"].color != "crimson"


def test_plotting_and_tables_import_neither_torch_nor_engine() -> None:
    script = (
        "import sys, kvbench.show.plot, kvbench.show.table\n"
        "bad = {'torch', 'transformers', 'lm_eval', 'matplotlib.pyplot', 'kvbench.engine', 'kvbench.study'}\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("metric", ["accuracy", "kl"])
def test_of_many_policies_the_best_are_coloured(tmp_path: Path, metric: str) -> None:
    """40 policies: ten have their names, the others are grey, and the numbers beside the figure have all."""
    names = [f"p{index:02d}" for index in range(40)]
    with Store.open(tmp_path, {}, {"style": STYLE}) as store:
        for index, name in enumerate([*names, "random"]):
            for budget in BUDGETS:
                values = {"accuracy": index / 50, "kl": 1 - index / 50}
                store.append([row(name, budget, f"s{sample}", metrics=values) for sample in range(3)])
    _, lines = split_panels(aggregate(read_rows(tmp_path), [metric]))[0]
    fig = draw_figure(chart_of(lines, assign_styles([*names, "random"], STYLE)), ["a heading"])
    (axes,) = fig.axes
    curves = {line.get_gid(): line for line in axes.get_lines() if line.get_gid()}
    assert set(curves) == {*names, "random"}
    grey = {name for name, line in curves.items() if line.get_color() == FAINT}
    assert grey == set(names[:30])
    (legend,) = fig.legends
    told = [text.get_text() for text in legend.get_texts()]
    assert set(names[30:]) < set(told)
    assert "30 others" in told
    assert not set(told) & grey
    (_, _, table) = plot(tmp_path, metric)[:3]
    assert set(pd.read_csv(table)["policy"]) == {*names, "random"}
