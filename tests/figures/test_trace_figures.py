"""Figures of recorded traces: each draws, shows what it says, and calls no model."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.errors import BadInput, KvbenchError, StoreError
from kvbench.learn.eviction_error import ErrorConfig, measure
from kvbench.learn.ranked import RecordedRanker, boundary
from kvbench.learn.trace import TraceSet
from kvbench.model import open as models
from kvbench.policies.kvp import study
from kvbench.policies.kvp.figures import costs as cost_figures
from kvbench.policies.kvp.figures import heads
from kvbench.policies.kvp.figures import importance as head_figures
from kvbench.policies.kvp.figures import rankings as rank_figures
from kvbench.policies.kvp.figures.objectives import OBJECTIVES
from kvbench.policies.kvp.scorer import ScorerShape
from kvbench.show.figures import Request, figure_kind
from kvbench.store.manifest import shown_data
from kvbench.store.results import read_rows
from tests.figures.capture import unsaved
from tests.kvp import make
from tests.kvp.make import CONTEXT, DIM, KV_HEADS, LAYERS

POLICIES = ("oracle", "knorm", "tova")
OF_TRACES = ("budget-cost", "head-costs", "importance", "rank-error", "rank-variance", "rank-matrix",
             "head-correlation")  # fmt: skip


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return make.synthetic(tmp_path_factory.mktemp("traces") / "mine", count=4)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        pytest.fail("a model was opened")

    for name in ("open_model", "load_model"):
        monkeypatch.setattr(models, name, refuse)
    monkeypatch.setattr("kvbench.learn.ranked.open_model", refuse)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = ScorerShape(LAYERS, KV_HEADS, DIM, 8, "none")
    return make.weights_file(tmp_path_factory.mktemp("weights") / "mine.safetensors", shape, "5e")


def written(name: str, traces: TraceSet, out: Path, **options: Any) -> list[Path]:
    """The files of a figure."""
    policies = () if name == "importance" else POLICIES
    asked = Request((str(traces.folder),), **{"policies": policies, "out": out, **options})
    return figure_kind(name).draw(asked)


def draw(name: str, traces: TraceSet, **options: Any) -> pd.DataFrame:
    """The numbers beside a figure, without its images."""
    with unsaved(cost_figures, head_figures, rank_figures) as kept:
        written(name, traces, Path("nowhere"), **options)
    (lines,) = kept.values()
    return lines


def test_budget_cost_adds_up_to_the_eviction_cost(traces: TraceSet, tmp_path: Path) -> None:
    lines = draw("budget-cost", traces)
    path, _ = measure(ErrorConfig(str(traces.folder), POLICIES, out=str(tmp_path / "run")), progress=False)
    costs = read_rows(path).groupby("spec")["metric:eviction_cost"].mean()
    for (policy, quantity), part in lines.groupby(["policy", "quantity"]):
        assert part["eviction_cost"].iloc[0] == pytest.approx(costs[policy], rel=1e-4)
        width = part["last_budget"] - part["first_budget"] + 1
        assert (
            part["first_budget"].iloc[1:].to_numpy() == part["last_budget"].iloc[:-1].to_numpy() + 1
        ).all()
        if quantity == "budget_cost":  # the last budgets fill no point
            assert 0.5 < (part["mean"] * width).sum() / part["eviction_cost"].iloc[0] <= 1 + 1e-6
        assert (part["lo"] <= part["mean"]).all()
        assert (part["mean"] <= part["hi"]).all()
        assert set(part["n"]) == {4}
    assert set(lines["traces"]) == {"mine"}


def test_budget_cost_of_one_head_by_loops(traces: TraceSet) -> None:
    lines = draw("budget-cost", traces, head="L1.H0", policies=("knorm",), limit=2)
    ranker = RecordedRanker.open(traces, ["knorm"])
    first, missed = [], []
    for trace in list(traces)[:2]:
        (one,) = ranker.rank(trace, boundary(trace))
        u = one.utility[1, 0].tolist()
        best = sum((rank + 1) * value for rank, value in enumerate(sorted(u, reverse=True)))
        order = one.orders["knorm"][1, 0].tolist()
        first.append([(b + 1) * u[order[b]] / best for b in range(3)])
        missed.append([sum(u[slot] for slot in order[b + 1 :]) / sum(u) for b in range(3)])
    known = {"budget_cost": first, "missed_mass": missed}
    for (quantity, expected), b in itertools.product(known.items(), range(3)):
        line = lines[(lines["budget"] == b + 1) & (lines["quantity"] == quantity)].iloc[0]
        assert line["mean"] == pytest.approx((expected[0][b] + expected[1][b]) / 2, rel=1e-5)
        assert line["n"] == 2


def test_head_costs_are_those_of_eviction_error(traces: TraceSet, tmp_path: Path) -> None:
    lines = draw("head-costs", traces)
    config = ErrorConfig(str(traces.folder), POLICIES, out=str(tmp_path / "run"))
    _, per_head = measure(config, progress=False)
    assert len(lines) == len(POLICIES) * LAYERS * KV_HEADS
    for line in lines.to_dict("records"):
        assert line["mean"] == pytest.approx(per_head[line["policy"]][line["layer"]][line["head"]], rel=1e-4)
        assert line["name"] == f"L{line['layer']}.H{line['head']}"


def test_importance_falls_and_adds_up_to_one(traces: TraceSet) -> None:
    lines = draw("importance", traces, sample=2)
    assert lines["head"].nunique() == LAYERS * KV_HEADS  # fewer than eight
    effective = lines.drop_duplicates("head")["effective_tokens"]
    assert effective.is_monotonic_increasing
    for _, part in lines.groupby("head"):
        assert part["share"].sum() == pytest.approx(1, abs=1e-4)
        assert part["share"].is_monotonic_decreasing
        assert part["rank"].tolist() == list(range(1, CONTEXT + 1))


def test_rank_errors_of_one_head(traces: TraceSet) -> None:
    lines = draw("rank-error", traces, head="L0.H1")
    ranker = RecordedRanker.open(traces, POLICIES)
    (one,) = ranker.rank(traces[0], boundary(traces[0]))
    u = one.utility[0, 1].tolist()
    for policy, part in lines.groupby("policy"):
        order = one.orders[str(policy)][0, 1].tolist()
        assert part["attention"].tolist() == pytest.approx(sorted(u, reverse=True), rel=1e-5)
        for line in part.to_dict("records"):
            expected = abs(order.index(line["position"]) + 1 - line["oracle_rank"]) / CONTEXT
            assert line["rank_error"] == pytest.approx(expected, abs=1e-5)
    assert lines[lines["policy"] == "oracle"]["rank_error"].max() == 0 < lines["rank_error"].max()


def test_matrix_variance_and_correlation_show_the_same_rankings(traces: TraceSet) -> None:
    matrix, variance, correlation = (
        draw(name, traces, pins="2,3") for name in ("rank-matrix", "rank-variance", "head-correlation")
    )
    assert len(matrix) == len(correlation) == len(POLICIES) * LAYERS * KV_HEADS
    (one,) = RecordedRanker.open(traces, POLICIES, "2,3").rank(traces[0], boundary(traces[0]))
    for policy in POLICIES:
        shown = matrix[matrix["policy"] == policy].drop(columns=["policy", "head"]).to_numpy()
        assert (shown == one.orders[policy].flatten(0, 1).numpy()).all()
        assert (shown[:, :2] == [0, 1]).all()  # the pinned first tokens
        ranks = np.argsort(shown, axis=1) + 1
        mine = variance[variance["policy"] == policy]
        assert mine["mean_rank"].to_numpy() == pytest.approx(ranks.mean(0), rel=1e-5)
        assert mine["variance"].to_numpy() == pytest.approx(ranks.var(0), rel=1e-5)
        pairs = correlation[correlation["policy"] == policy].drop(columns=["policy", "head"]).to_numpy()
        assert pairs == pytest.approx(heads.spearman(one.orders[policy]).numpy(), abs=1e-4)


@pytest.mark.parametrize("name", OF_TRACES)
def test_every_figure_is_drawn_and_equal_traces_give_equal_files(
    traces: TraceSet, tmp_path: Path, name: str
) -> None:
    options: dict[str, Any] = {} if name == "importance" else {"policies": ("knorm",)}
    if name == "budget-cost":
        options |= {"head": "L1.H0", "limit": 2}
    image, drawing, numbers = written(name, traces, tmp_path / "one", **options)
    mark = shown_data(numbers.read_bytes()).encode()
    assert all(mark in file.read_bytes() for file in (image, drawing))
    assert image.read_bytes()[:4] == b"\x89PNG"
    ElementTree.fromstring(drawing.read_bytes())
    assert numbers.stem == f"{name}-L1.H0" if name == "budget-cost" else name
    for file in written(name, traces, tmp_path / "two", **options):
        assert file.read_bytes() == (tmp_path / "one" / file.name).read_bytes()


def test_learned_weights_are_named_without_their_path(traces: TraceSet, tmp_path: Path, weights: str) -> None:
    for file in written("budget-cost", traces, tmp_path, policies=(f"kvp:weights={weights}",)):
        assert str(Path(weights).parent).encode() not in file.read_bytes()
    for name in OF_TRACES:
        if name != "importance":
            lines = draw(name, traces, policies=(f"kvp:weights={weights}",))
            assert set(lines["policy"]) == {"kvp:weights=mine"}


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the study of KVP leaves: weights of two objectives, and its table."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "weights").mkdir()
    shape = ScorerShape(LAYERS, KV_HEADS, DIM, 8, "none")
    for seed, name in enumerate(("base", "regression")):
        make.weights_file(folder / "weights" / f"{name}.safetensors", shape, "5e", seed)
    names = ["base", "regression", "budgets-log", "tova"]
    table = pd.DataFrame({"variant": names, "boundary cost": [1.6, 1.8, 1.7, 2.2]})
    table = table.assign(**{"boundary missed@tight": [0.3, 0.3, 0.3, 0.4], "needle@64": [1, 0.9, 0.9, 0]})
    table.to_csv(folder / "study.csv", index=False)
    return folder


def test_objectives_of_a_study(studied: Path, traces: TraceSet, tmp_path: Path) -> None:
    files = figure_kind("objectives").draw(Request((str(studied),), out=tmp_path))
    lines = pd.read_csv(files[2])
    assert lines["variant"].tolist() == [
        "softcost",
        "regression",
        "tova",
    ]  # by cost; budgets-log is no objective
    assert lines["learned"].tolist() == [True, True, False]
    with unsaved(cost_figures) as kept:
        asked = Request((str(studied), str(traces.folder)), pins="none")
        figure_kind("objectives-by-budget").draw(asked)
    lines = kept["objectives-by-budget"]
    assert set(lines["policy"]) == {"softcost", "regression", "oracle"}
    over = lines[lines["quantity"] == "over_oracle"]
    assert (over[over["policy"] == "oracle"]["mean"] == 1).all()
    assert (over["mean"] >= 1 - 1e-6).all()
    pair = (f"kvp:weights={studied}/weights/base.safetensors", "oracle")
    masses = draw("budget-cost", traces, policies=pair).query("quantity == 'missed_mass'")
    missed = masses.pivot_table(index="budget", columns="policy", values="mean")
    expected = (missed["kvp:weights=base"] / missed["oracle"]).to_numpy()
    assert over[over["policy"] == "softcost"]["mean"].to_numpy() == pytest.approx(expected, rel=1e-4)
    assert {study.VARIANTS[name].get("objective", "softcost") for name in OBJECTIVES} == {
        "softcost", "rl", "regression", "ranknet", "listnet", "softsort", "weighted_softsort",
    }  # fmt: skip


def refused(name: str, *paths: Any, kind: type[KvbenchError] = BadInput, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        figure_kind(name).draw(Request(tuple(map(str, paths)), **options))
    return str(caught.value)


@pytest.mark.parametrize("name", OF_TRACES)
def test_traces_are_asked_for(name: str, tmp_path: Path) -> None:
    assert "needs a folder of kvbench trace: make one with kvbench trace" in refused(name)
    assert "holds no traces" in refused(name, tmp_path, kind=StoreError)


def test_what_does_not_fit_is_refused(
    traces: TraceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = traces.folder
    assert "L0.H0 to L1.H1" in refused("rank-error", folder, head="L9.H0", policies=("knorm",))
    assert "L0.H0 to L1.H1" in refused("budget-cost", folder, head="L9.H0", policies=("knorm",))
    assert "has 4 traces, from 0 on" in refused("importance", folder, sample=4)
    assert "one folder of traces, 2 were given" in refused("importance", folder, folder)
    assert "one folder of traces, 2 were given" in refused("head-costs", folder, folder, policies=("knorm",))
    assert "pins" in refused("rank-matrix", folder, pins="many", policies=("knorm",))
    assert "model" in refused("rank-matrix", folder, policies=("kvp",))  # trained for another one
    assert "no usable study.csv" in refused("objectives", folder)
    assert "has no weights" in refused("objectives-by-budget", folder)
    monkeypatch.chdir(tmp_path)
    assert "kvbench.policies.kvp.study" in refused("objectives")
    make.TraceWriter(tmp_path / "empty", make.header())
    assert "holds no trace yet" in refused("budget-cost", tmp_path / "empty", policies=("knorm",))


def test_the_command_draws(traces: TraceSet, tmp_path: Path) -> None:
    command = ["figure", "rank-matrix", str(traces.folder), "--policy", "knorm,tova", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(tmp_path / f"rank-matrix.{end}") for end in ("png", "svg", "csv")]
