"""Workers of a local Ray: the rows of a run in one process, whoever dies."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbench
from kvbench.errors import BadInput, UnknownName, WorkersLost
from kvbench.learn.collect import collect
from kvbench.policies.kvp.checkpoint import read_weights
from kvbench.policies.kvp.command import train_file, train_sharded
from kvbench.store.results import Store, read_manifest
from kvbench.study.executors import LostJob
from tests.kvp import make
from tests.laws.runs import by_key, lines
from tests.scale import jobs
from tests.scale.test_executors import stored, trace_config

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

if importlib.util.find_spec("ray") is not None:
    from kvbench.study import executor_ray
    from kvbench.study.executor_ray import RayExecutor, _gpus, _size


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of two cores for all tests of this file: starting one takes seconds."""
    import ray

    from kvbench.study.executor_ray import QUIET

    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=2, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()


@pytest.fixture
def two_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every death costs a start of a process; two of them show what three do."""
    monkeypatch.setattr(executor_ray, "TRIES", 2)


def config(model: str, out: Path, **changes: Any) -> kvbench.RunConfig:
    given: dict[str, Any] = {
        "policies": ("knorm", "random", "tova"),
        "tasks": ("ppl/text:length=96,continuation=16",),
    }
    given |= {"budgets": (8, 40), "limit": 6, "model": model, "device": "cpu", "out": str(out)}
    return kvbench.RunConfig(**(given | changes))


@pytest.mark.usefixtures("cluster")
def test_rows_are_those_of_one_process(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, one of which is killed before all is done; this process then adds more samples.

    A worker that holds a model costs seconds of imports, so there are no more than these two: what takes the
    place of a dead one is tried without models below.
    """
    local = kvbench.run(config(folder, tmp_path / "local"), progress=False)
    executor = RayExecutor(workers=2)
    append, killed = Store.append, []

    def deadly(self: Store, rows: Any) -> None:
        append(self, rows)
        if not killed:
            killed.append(next(iter(executor.pids.values())))
            os.kill(killed[0], signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", deadly)
        first = kvbench.run(config(folder, tmp_path / "ray", limit=2), progress=False, executor=executor)
    assert killed
    assert first.failed == 0
    again = kvbench.run(config(folder, tmp_path / "ray"), progress=False)
    assert again.failed == 0
    assert by_key(lines(tmp_path / "ray")) == by_key(lines(tmp_path / "local"))
    columns = ["policy", "budget", "metric", "mean", "lo", "hi", "n"]
    measured = [
        result.table[~result.table["metric"].str.endswith("_s")][columns].reset_index(drop=True)
        for result in (local, again)
    ]
    assert measured[0].equals(measured[1])
    run = read_manifest(tmp_path / "ray")["runs"][0]
    assert (run["executor"], run["workers"], run["threads"]) == ("ray", 2, 1)
    assert run["peak_bytes"] == first.peak > 50 * 2**20
    assert read_manifest(tmp_path / "ray")["fixed"] == read_manifest(tmp_path / "local")["fixed"]


@pytest.mark.usefixtures("cluster")
def test_traces_are_those_of_one_process(folder: str, tmp_path: Path) -> None:
    collect(trace_config(folder, tmp_path / "local", 5), progress=False)
    collect(trace_config(folder, tmp_path / "ray", 5), progress=False, executor=RayExecutor(workers=1))
    assert stored(tmp_path / "ray") == stored(tmp_path / "local")


@pytest.mark.usefixtures("cluster")
def test_weights_are_those_of_one_process(tmp_path: Path) -> None:
    traces = make.synthetic(tmp_path / "traces").folder
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    recipe = replace(make.QUICK, objective="softcost")
    train_file(recipe, traces, one, lambda text: None)
    train_sharded(recipe, traces, two, lambda text: None, RayExecutor(workers=2))
    with torch.no_grad():
        for a, b in zip(*(read_weights(path)[0].tensors().values() for path in (one, two)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("cluster", "two_tries")
def test_who_dies_once_is_tried_again_and_who_kills_is_given_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    work = [0, 1, 2, 3, tmp_path / "once", 5]
    found = dict(RayExecutor(workers=1).compute(jobs.hold, jobs.deadly, work))
    lost = found.pop(3)
    assert isinstance(lost, LostJob)
    assert "died 2 times" in lost.reason
    assert found == {0: 0, 1: 2, 2: 4, 4: "once", 5: 10}
    told = capfd.readouterr()
    assert "worker" not in told.out + told.err  # Ray's own page about a death


@pytest.mark.usefixtures("cluster", "two_tries")
def test_workers_that_die_at_the_start_end_the_work() -> None:
    with pytest.raises(WorkersLost, match="loaded the model"):
        list(RayExecutor(workers=1).compute(jobs.die_at_start, jobs.double, [1, 2]))


@pytest.mark.usefixtures("cluster")
def test_errors_come_back_as_they_are() -> None:
    with pytest.raises(UnknownName, match="unknown thing 'x'"):
        list(RayExecutor(workers=1).compute(jobs.hold, jobs.refuse, [1]))


def test_a_cluster_that_is_not_there(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at once, with what to do; nothing is started instead."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", None)
    with pytest.raises(BadInput, match="ray start"):
        RayExecutor(1, address).open(folder, "auto", "auto")


def node(cores: float, gpus: float = 0) -> dict[str, Any]:
    return {"Alive": True, "Resources": {"CPU": cores} | ({"GPU": gpus} if gpus else {})}


@pytest.mark.parametrize(
    ("nodes", "workers", "gpus", "threads", "expected"),
    [
        ([node(8)], None, 0, "", (1, 8)),
        ([node(8)], 3, 0, "", (3, 2)),
        ([node(8), node(4), node(0)], None, 0, "", (2, 4)),
        ([node(8)], 2, 0, "1", (2, 1)),
        ([node(16, 4), node(16, 4)], None, 1, "", (8, 4)),
        ([node(16, 4), node(16, 4)], None, 4, "", (2, 16)),
    ],
)
def test_threads_share_the_cores(
    nodes: list[dict[str, Any]], workers: int | None, gpus: int, threads: str, expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert _size(nodes, workers, gpus) == expected


@pytest.mark.parametrize(
    ("gpus", "workers", "spread", "expected"),
    [
        ([4, 4], None, False, 1),
        ([4, 4], None, True, 4),
        ([4, 2], 2, True, 2),
        ([8], 2, True, 4),
        ([2], 4, True, 1),
    ],
)
def test_gpus_of_a_worker(gpus: list[float], workers: int | None, spread: bool, expected: int) -> None:
    assert _gpus(gpus, workers, spread) == expected


def test_more_workers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in ("", "4"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with pytest.raises(BadInput, match="only 2 cores"):
            _size([node(2)], 3, 0)


@pytest.mark.usefixtures("cluster")
def test_a_gpu_that_nobody_has(folder: str) -> None:
    with pytest.raises(BadInput, match="no machine of the Ray cluster"):
        RayExecutor().open(folder, "cuda", "auto")
    assert RayExecutor().open(folder, "auto", "auto").device.type == "cpu"
