"""Executors without a cluster: the order of results, what is refused, what becomes of lost work."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvbench
from kvbench.cli import main as cli
from kvbench.cli.options import make_executor
from kvbench.errors import BadInput, KvbenchError, StoreError, UnknownName, WorkersLost
from kvbench.learn.collect import TraceConfig, collect
from kvbench.learn.trace import TraceSet
from kvbench.model.open import OpenModel, open_model
from kvbench.store.results import read_manifest
from kvbench.study.executors import Executor, Hold, Local, LostJob, Work, in_order
from tests.laws import toy
from tests.laws.runs import by_key, config, lines
from tests.scale import jobs
from tests.tiny import LAYERS


class Backwards(Local):
    """Computes the last job first, and loses those in `lost`."""

    lost: Sequence[int] = ()

    def compute(self, hold: Hold, work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        held = pickle.loads(pickle.dumps(hold))()
        work = pickle.loads(pickle.dumps(work))
        for index in reversed(range(len(jobs))):
            job = pickle.loads(pickle.dumps(jobs[index]))
            yield index, LostJob("its worker died") if index in self.lost else work(held, job)


def test_local_computes_in_order() -> None:
    assert list(Local().compute(jobs.hold, jobs.double, [5, 1])) == [(0, 10), (1, 2)]


def test_in_order() -> None:
    assert list(in_order([(1, "b"), (0, "a"), (3, "d"), (2, "c")])) == ["a", "b", "c", "d"]


def test_the_order_of_work_and_pickling_change_no_row(folder: str, tmp_path: Path) -> None:
    with toy.added():
        kvbench.run(config(folder, tmp_path / "here"), progress=False)
        kvbench.run(config(folder, tmp_path / "there"), progress=False, executor=Backwards())
    assert by_key(lines(tmp_path / "here")) == by_key(lines(tmp_path / "there"))
    assert lines(tmp_path / "here") != lines(tmp_path / "there")


def test_lost_samples_are_failed_rows_and_tried_again(folder: str, tmp_path: Path) -> None:
    executor = Backwards()
    executor.lost = (1, 4)
    with toy.added():
        first = kvbench.run(config(folder, tmp_path), progress=False, executor=executor)
        assert first.failed == 2 * 7
        assert any("its worker died" in note for note in first.notes)
        second = kvbench.run(config(folder, tmp_path), progress=False)
        assert second.failed == 0
        kvbench.run(config(folder, tmp_path / "whole"), progress=False)
    assert by_key([row for row in lines(tmp_path) if row["status"] == "ok"]) == by_key(
        lines(tmp_path / "whole")
    )


def test_other_weights_on_a_worker_are_refused(folder: str, tmp_path: Path) -> None:
    class Mixed(Local):
        def compute(self, hold: Hold, work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
            for index, rows in super().compute(hold, work, jobs):
                yield index, [replace(row, key="0" * 16) for row in rows]

    with toy.added(), pytest.raises(BadInput, match="same files"):
        kvbench.run(config(folder, tmp_path), progress=False, executor=Mixed())


def test_the_peak_of_a_run_is_measured_and_stored(folder: str, tmp_path: Path) -> None:
    with toy.added():
        result = kvbench.run(config(folder, tmp_path), progress=False)
        again = kvbench.run(config(folder, tmp_path), progress=False)
    runs = read_manifest(tmp_path)["runs"]
    assert runs[0]["executor"] == "local"
    assert runs[0]["peak_bytes"] == result.peak > 50 * 2**20  # torch alone takes more
    assert again.peak == 0  # nothing was computed
    assert "peak_bytes" not in runs[1]


def test_the_command_prints_the_peak(folder: str, tmp_path: Path) -> None:
    command = ["run", "--policy", "knorm", "--task", "laws_toy", "--budgets", "8", "--model", folder,
               "--device", "cpu", "--out", str(tmp_path)]  # fmt: skip
    with toy.added():
        result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert "peak memory: " in result.output


def test_a_model_is_found_again_elsewhere(folder: str, tmp_path: Path) -> None:
    """Another machine: the folder is not where it was, or it has other files."""
    opened = open_model(folder, "cpu")
    moved: OpenModel = pickle.loads(pickle.dumps(opened))
    object.__setattr__(moved, "folder", tmp_path / "not here")
    assert moved.load().sha256 == opened.sha256
    other = tmp_path / "other"
    other.mkdir()
    for file in Path(folder).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    object.__setattr__(moved, "folder", other)
    with pytest.raises(BadInput, match="fingerprint"):
        moved.load()


@pytest.mark.parametrize("error", [UnknownName("policy", "x", ["y"]), BadInput("no"), StoreError("full")])
def test_errors_travel(error: KvbenchError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_the_choice_of_an_executor() -> None:
    assert isinstance(make_executor("local"), Local)
    assert isinstance(make_executor("ray", 2), Executor)
    for bad in ({"name": "slurm"}, {"name": "local", "workers": 2}, {"name": "ray", "workers": 0}):
        with pytest.raises(BadInput):
            make_executor(**bad)  # type: ignore[arg-type]


def test_run_time_plugins_are_refused_before_anything_loads(folder: str, tmp_path: Path) -> None:
    with toy.added(), pytest.raises(BadInput, match="registered at run time"):
        kvbench.run(config(folder, tmp_path), progress=False, executor=make_executor("ray", 1))
    assert not (tmp_path / "rows.jsonl").exists()


def stored(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def trace_config(folder: str, out: Path, samples: int = 10) -> TraceConfig:
    task = "ppl/text:length=64,continuation=8"
    return TraceConfig((task,), samples, str(out), model=folder, device="cpu", under="knorm:16")


def test_traces_lie_in_the_order_of_the_samples(folder: str, tmp_path: Path) -> None:
    collect(trace_config(folder, tmp_path / "here"), progress=False)
    collect(trace_config(folder, tmp_path / "there"), progress=False, executor=Backwards())
    assert len(stored(tmp_path / "here")) > LAYERS * 2
    assert stored(tmp_path / "here") == stored(tmp_path / "there")


def test_a_lost_trace_is_named_and_the_others_stay(folder: str, tmp_path: Path) -> None:
    executor = Backwards()
    executor.lost = (2,)
    with pytest.raises(WorkersLost, match="1 traces could not be recorded"):
        collect(trace_config(folder, tmp_path), progress=False, executor=executor)
    assert len(TraceSet(tmp_path)) == 9
    assert len(collect(trace_config(folder, tmp_path), progress=False)) == 10
