"""Figures of stored runs: panels, curves, pooled tasks, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.errors import BadInput, StoreError, UnknownName
from kvbench.show import figures, grid
from kvbench.show.figures import Request, figure_kind, kinds
from kvbench.show.panel import Declarations, build_panels, read_declarations
from kvbench.show.scale import reads_better_in_logs
from kvbench.stats.aggregate import aggregate
from kvbench.stats.panels import split_panels
from kvbench.store.results import Store, read_rows
from tests.figures.capture import unsaved
from tests.store.synthetic import STYLE, row

MAIN = {
    "ruler/vt": "string_match", "ruler/cwe": "string_match", "ppl/oasst": "ppl", "ppl/text": "ppl",
    "boolq": "accuracy", "gov_report": "rouge_score", "arc_challenge": "acc_norm", "mmlu": "accuracy",
    "hellaswag": "acc_norm", "passage_retrieval_en": "retrieval_score",
}  # fmt: skip
LEARNED = {"kvp": "w1", "judgeq": "w2"}
TOLD = {"unit": "0..1", "description": "d", "better": "higher", "limits": [0.0, 1.0]}


def make(
    folder: Path, tasks: dict[str, int], policies: tuple[str, ...] = ("kvp", "judgeq", "random")
) -> Path:
    """A run of several tasks. tasks: {task: samples}."""
    own = {name: {"name": name, **TOLD} for name in ("rouge_score", "retrieval_score")}
    extra = {"style": STYLE, "tasks": {name: {"metric": MAIN[name]} for name in tasks}, "metrics": own}
    with Store.open(folder, {}, extra) as store:
        for task, count in tasks.items():
            for index in range(count):
                draw = random.Random(f"{task} {index}")
                for spec in ("full", "oracle", *policies):
                    for budget in (64, 128, 256) if spec != "full" else (None,):
                        value = {MAIN[task]: draw.random(), "kl": draw.random(), "nll": 1.0, "nll_tokens": 4}
                        weights = LEARNED.get(spec, "")
                        names = {"task": task, "task_spec": task, "weights": weights}
                        store.append([row(spec, budget, f"s{index}", metrics=value, **names)])
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tasks = {"boolq": 4, "ruler/vt": 3, "ruler/cwe": 5, "ppl/oasst": 3, "ppl/text": 3}
    return make(tmp_path_factory.mktemp("run"), tasks)


def refused(*command: Any) -> str:
    done = CliRunner().invoke(cli.app, ["figure", *map(str, command)])
    assert done.exit_code == cli.REFUSED, done.output
    return " ".join(done.stderr.split())


def found(path: Path, each: bool = False) -> dict[str, pd.DataFrame]:
    rows, tasks = read_rows(path), read_declarations([path]).tasks
    if not each:
        rows, tasks = grid.pool_subtasks(rows, tasks)
    return {setting["task"]: lines for setting, lines in split_panels(aggregate(rows))}


def test_tasks_of_a_group_are_pooled_and_perplexities_are_not(run: Path) -> None:
    parts = found(run)
    assert set(parts) == {"boolq", "ruler, 2 subtasks", "ppl/oasst", "ppl/text"}
    rows = read_rows(run)
    lines = parts["ruler, 2 subtasks"].query("metric == 'string_match'")
    assert set(lines["n"]) == {8}
    for line in lines.to_dict("records"):
        inside = rows[(rows["spec"] == line["policy"]) & rows["task"].str.startswith("ruler/")]
        if line["policy"] != "full":
            inside = inside[inside["budget"] == line["budget"]]
        values = inside["metric:string_match"].tolist()
        assert line["mean"] == pytest.approx(sum(values) / 8)
        assert line["lo"] < line["mean"] < line["hi"]
    assert set(found(run, each=True)) == {"boolq", "ruler/vt", "ruler/cwe", "ppl/oasst", "ppl/text"}


def test_pooling_keeps_settings_apart(tmp_path: Path) -> None:
    with Store.open(tmp_path, {}, {}) as store:
        for task in ("ruler/vt", "ruler/cwe"):
            for value, question in ((0.2, "seen"), (0.6, "withheld")):
                names = {"task": task, "task_spec": task, "question": question}
                store.append([row("knorm", 64, metrics={"string_match": value}, **names)])
    rows, _ = grid.pool_subtasks(
        read_rows(tmp_path), {t: {"metric": "string_match"} for t in ("ruler/vt", "ruler/cwe")}
    )
    lines = aggregate(rows, ["string_match"])
    assert dict(zip(lines["question"], lines["mean"], strict=True)) == {"seen": 0.2, "withheld": 0.6}


def test_subtasks_that_read_a_file_are_pooled_with_the_others(tmp_path: Path) -> None:
    specs = {"ruler/vt": 0.0, "ruler/qa_1:file=data/one.json": 1.0, "ruler/vt:length=512": 0.5}
    with Store.open(tmp_path, {}, {}) as store:
        for spec, value in specs.items():
            names = {"task": spec.split(":")[0], "task_spec": spec}
            store.append([row("knorm", 64, metrics={"string_match": value}, **names)])
    rows, _ = grid.pool_subtasks(read_rows(tmp_path), {spec: {"metric": "string_match"} for spec in specs})
    lines = aggregate(rows, ["string_match"])
    means = dict(zip(lines["task"], lines["mean"], strict=True))
    assert means == {"ruler, 2 subtasks": 0.5, "ruler/vt:length=512": 0.5}


def test_runs_over_other_samples_are_not_compared(tmp_path: Path) -> None:
    for name, samples in (("one", "ab"), ("two", "cd"), ("three", "de")):
        with Store.open(tmp_path / name, {}, {}) as store:
            spec = "tova" if name == "three" else "knorm"
            store.append([row(spec, 64, sample) for sample in samples])
    tasks = {"boolq": {"metric": "acc_norm"}}
    pair, named = grid.separate_runs(read_rows([tmp_path / "one", tmp_path / "two"]), tasks)
    assert named["boolq of two"] == {"metric": "acc_norm"}
    assert dict(zip(pair["sample"], pair["task_spec"], strict=True)) == {
        "a": "boolq of one", "b": "boolq of one", "c": "boolq of two", "d": "boolq of two",
    }  # fmt: skip
    for names in (["one"], ["two", "three"]):
        rows, named = grid.separate_runs(read_rows([tmp_path / name for name in names]), tasks)
        assert (set(rows["task_spec"]), named) == ({"boolq"}, tasks)


def test_budget_curves_lay_tasks_out_with_one_legend(run: Path) -> None:
    tiles = grid.find_tiles(read_rows(run), read_declarations([run]))
    assert [tile.metric for tile in tiles] == ["accuracy", "string_match", "ppl", "ppl"]
    fig = grid.draw_grid(tiles)
    assert [axes.get_title(loc="left").splitlines()[0] for axes in fig.axes] == list(found(run))
    assert [axes.get_ylabel() for axes in fig.axes][1] == "string match\n(0..1, higher is better)"
    for axes, tile in zip(fig.axes, tiles, strict=True):
        curves = {line.get_gid(): line for line in axes.get_lines() if line.get_gid()}
        assert set(curves) == {"oracle", "kvp", "judgeq", "random"}
        mean = tile.lines[tile.lines["policy"] == "kvp"].sort_values("budget")["mean"].tolist()
        assert list(curves["kvp"].get_ydata()) == mean
        assert axes.get_legend() is None
    assert "n = 8" in fig.axes[1].get_title(loc="left")
    (legend,) = fig.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == len(set(names))
    assert {"full cache", "oracle (bracket)", "kvp", "judgeq", "random (bracket)", "95% interval"} <= set(
        names
    )
    fig.draw_without_rendering()
    box = legend.get_window_extent()
    assert all(box.y1 <= axes.get_window_extent().y0 for axes in fig.axes)


def test_every_task_of_the_paper_has_its_panel(tmp_path: Path) -> None:
    """Tasks without a committed run, too: their folders only have to exist."""
    names = ("gov_report", "passage_retrieval_en", "arc_challenge", "mmlu", "hellaswag")
    folders = [make(tmp_path / name, {name: 2}, ("kvp",)) for name in names]
    with unsaved(grid) as kept:
        figure_kind("budget-curves").draw(Request(tuple(map(str, folders))))
    lines = kept["budget-curves"]
    assert dict(zip(lines["task"], lines["metric"], strict=True)) == {name: MAIN[name] for name in names}
    assert str(tmp_path) not in lines.to_csv()


def test_learned_policies_alone_below_the_upper_bracket(run: Path, tmp_path: Path) -> None:
    files = figure_kind("learned").draw(Request((str(run),), metrics=("kl",), out=tmp_path))
    assert [file.name for file in files] == [f"learned-kl.{end}" for end in ("png", "svg", "csv")]
    lines = pd.read_csv(files[2])
    assert set(lines["policy"]) == {"full", "oracle", "kvp", "judgeq"}
    assert set(lines["metric"]) == {"kl"}
    nobody = make(tmp_path / "nobody", {"boolq": 2}, ("knorm",))
    with pytest.raises(BadInput, match="no policy in these rows has learned weights"):
        figure_kind("learned").draw(Request((str(nobody),), out=tmp_path))


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    few = make(tmp_path / "few", {"boolq": 2, "ppl/oasst": 2}, ("kvp",))
    kind = figure_kind("budget-curves")
    files = [kind.draw(Request((str(few),), out=tmp_path / name)) for name in ("one", "two")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_what_a_figure_cannot_use_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "unknown figure 'budget-curve'. Did you mean 'budget-curves'?" in refused("budget-curve", run)
    assert "`kvbench figure --list`" in refused("nothing", run)
    assert "kvbench figure --list" in refused()
    assert "--head: figure 'budget-curves' does not take it" in refused(
        "budget-curves", run, "--head", "L0.H0"
    )
    monkeypatch.chdir(tmp_path)  # no committed reference here
    assert "needs run folders: name folders that kvbench run wrote" in refused("budget-curves")
    assert "no rows in" in refused("budget-curves", tmp_path)
    assert "holds no rows of kvbench speed" in refused("wall-clock", run)
    asked = Request((str(run),), policies=("randm",), out=tmp_path)
    with pytest.raises(UnknownName, match="Did you mean 'random'"):
        figure_kind("budget-curves").draw(asked)
    with pytest.raises(UnknownName, match="metric 'agreement'"):
        figure_kind("budget-curves").draw(Request((str(run),), metrics=("agreement",), out=tmp_path))
    with pytest.raises(BadInput, match="--sample -1"):
        Request(sample=-1)
    with Store.open(tmp_path / "failed", {}, {}) as store:
        store.append([row("knorm", 64, status="failed", reason="no")])
    with pytest.raises(StoreError, match="no usable rows"):
        figure_kind("budget-curves").draw(Request((str(tmp_path / "failed"),), out=tmp_path))


def test_wall_clock_shows_medians_of_every_length(tmp_path: Path) -> None:
    fixed = {"model": "tiny", "dtype": "float32", "device": "cpu", "hardware": "a chip", "threads": 1}
    with Store.open(tmp_path / "speed", fixed, {"style": STYLE}) as store:
        for length, seconds in ((512, (1.0, 3.0, 2.0)), (1024, (4.0, 5.0, 9.0))):
            for repeat, value in enumerate(seconds):
                names = {"task": "speed", "task_spec": f"speed:length={length}", "context_tokens": length}
                times = {"prefill_s": value, "score_s": value / 10}
                store.append([row("full", None, f"r{repeat}", times={"prefill_s": value}, **names)])
                store.append([row("knorm", 64, f"r{repeat}", times=times, **names)])
    files = figure_kind("wall-clock").draw(Request((str(tmp_path / "speed"),), out=tmp_path))
    lines = pd.read_csv(files[2]).set_index(["policy", "context_tokens"])
    shown = ["median_s", "least_s", "most_s", "n", "layers"]
    assert lines.loc[("full", 512), shown].tolist() == [2, 1, 3, 3, 30]
    assert lines.loc[("knorm", 1024), shown].tolist() == [0.5, 0.4, 0.9, 3, 30]
    assert lines.loc[("knorm", 1024), "stage"] == "score"
    assert "needs a folder of kvbench speed" in refused("wall-clock")
    both = (tmp_path / "speed", tmp_path / "speed")
    assert "draws one folder, 2 were given" in refused("wall-clock", *both)


def test_chosen_policies_are_drawn_alone(run: Path) -> None:
    with unsaved(grid) as kept:
        figure_kind("budget-curves").draw(Request((str(run),), policies=("kvp", "random"), each=True))
    lines = kept["budget-curves-each"]
    assert set(lines["policy"]) == {"full", "kvp", "random"}
    assert set(lines["task"]) == {"boolq", "ruler/vt", "ruler/cwe", "ppl/oasst", "ppl/text"}


def test_the_committed_reference_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("results/reference/mine"), {"boolq": 2}, ("kvp",))
    Path("results/reference/notes").mkdir()
    assert figures.reference_folders() == ["results/reference/mine"]
    files = figure_kind("budget-curves").draw(Request())
    assert files[0] == Path("results/figures/budget-curves.png")


def test_the_list_names_all_and_what_they_take() -> None:
    for command in (["figure", "--list"], ["list", "figures"]):
        text = CliRunner().invoke(cli.app, command).stdout
        for kind in kinds():
            assert kind.name in text
        assert "run folders" in text
        assert "--metric" in text


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ([8.6, 8.7, 9.0, 9.8, 10.2, 12.2, 36.7], True),  # one large value presses the others
        ([9, 10, 11, 12, 13, 14], False),  # nothing spans a factor of 3
        ([1, 8, 15, 22, 29], False),  # evenly spread
        ([1, 8, 15, 22, 31], True),  # more than a factor of 30
        ([0, 0.1, 0.2, 5], False),  # zero has no logarithm
    ],
)
def test_the_axis_is_logarithmic_by_rule(means: list[float], expected: bool) -> None:
    assert reads_better_in_logs(np.array(means, dtype=float)) is expected


def test_a_pressed_perplexity_has_named_ticks(tmp_path: Path) -> None:
    with Store.open(tmp_path, {}, {}) as store:
        for spec, nll in (("full", 2.1), ("kvp", 2.2), ("knorm", 2.3), ("tova", 2.25), ("snapkv", 3.6)):
            for sample in ("a", "b"):
                metrics = {"nll": nll, "nll_tokens": 10}
                store.append([row(spec, None if spec == "full" else 32, sample, metrics=metrics)])
    (panel,), _ = build_panels(read_rows(tmp_path), Declarations({}, STYLE), ["ppl"])
    fig = grid.draw_grid([grid.Tile(panel, "ppl")])
    (axes,) = fig.axes
    assert axes.get_yscale() == "log"
    fig.draw_without_rendering()
    shown = {text.get_text() for text in axes.get_yticklabels()}
    assert {"10", "20"} <= shown
