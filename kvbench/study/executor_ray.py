"""Workers on a Ray cluster: each holds a model, takes one job at a time, and may die.

A job whose worker died is tried again by another one, at most TRIES times in all; then it is `LostJob`.
A worker that dies is replaced as long as there is work.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from ..contract.registry import POLICIES, TASKS
from ..errors import BadInput, KvbenchError, WorkersLost
from ..model.memory import peak_bytes
from .executors import RAY_INSTALL, Executor, Hold, LostJob, Work

if TYPE_CHECKING:
    from ..model.open import OpenModel

TRIES = 3  # workers that may die over one job, or one after the other while they start
AHEAD = 4  # jobs per worker that may be done before an earlier one is
PATIENCE = 60.0  # seconds without news before the cluster is asked whether there can be any
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class Worker:
    """What runs in a worker's process."""

    def __init__(self, threads: int, parts: tuple[Hold, Work]) -> None:
        torch.set_num_threads(threads)
        self.hold, self.work = parts

    def start(self) -> int:
        """Make what the worker holds; returns its process id."""
        self.held = self.hold()
        return os.getpid()

    def compute(self, job: Any) -> tuple[Any, int]:
        """The result of a job, and the worker's peak memory so far."""
        result = self.work(self.held, job)
        return result, peak_bytes()


class RayExecutor(Executor):
    """Shards jobs over the workers of a Ray cluster.

    workers: how many; None is one per GPU, or one per machine of a cluster without GPUs. address: of a
    cluster; None is what RAY_ADDRESS says, else a cluster that runs on this machine, else a new one
    for the time of the work. pids: of the live workers, on whatever machine they are.
    """

    name = "ray"

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        if workers is not None and workers < 1:
            raise BadInput(f"--workers {workers}: must be 1 or more")
        self.workers = workers
        self.address = address
        self.pids: dict[Any, int] = {}
        self._facts: dict[str, Any] = {}
        self._gpus = 0
        self._session = ExitStack()
        self._ray: Any = None

    def check(self, kind: str, names: Iterable[str]) -> None:
        registry = {"policy": POLICIES, "task": TASKS}[kind]
        for name in names:
            if not registry.installed(name):
                raise BadInput(
                    f"{kind} '{name}' was registered at run time ({registry.where(name)}), and workers are "
                    f"processes of their own that cannot see it: install it as a package with an entry "
                    f"point in '{registry.group}' (see CONTRIBUTING.md), or use --executor local"
                )

    def open(self, name: str, device: str, dtype: str) -> OpenModel:
        from ..model.open import open_model

        if device == "cpu":
            return open_model(name, device, dtype)
        gpus = [node["Resources"].get("GPU", 0) for node in _nodes(self._connected())]
        where = ("cuda" if any(gpus) else "cpu") if device == "auto" else device
        if where != "cpu" and not any(gpus):
            raise BadInput(f"--device {device}: no machine of the Ray cluster offers a GPU; use cpu or auto")
        opened = open_model(name, where, dtype, tried=False)
        self._gpus = _gpus(gpus, self.workers, opened.spread) if opened.device.type == "cuda" else 0
        return opened

    def width(self) -> int:
        return _size(_nodes(self._connected()), self.workers, self._gpus)[0]

    def facts(self) -> dict[str, Any]:
        return {"executor": self.name, **self._facts}

    def compute(self, hold: Hold, work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        ray = self._connected()
        size, threads = _size(_nodes(ray), self.workers, self._gpus)
        size = min(size, len(jobs))
        self._facts = {"workers": size, "threads": threads}
        options = {"num_cpus": threads, "num_gpus": self._gpus, "max_restarts": 0, "max_task_retries": 0}
        remote = ray.remote(Worker).options(scheduling_strategy="SPREAD", **options)
        parts = ray.put((hold, work))
        crew = _Crew(self, lambda: remote.remote(threads, parts), size, jobs)
        try:
            yield from crew.results()
        finally:
            crew.dismiss()

    def close(self) -> None:
        self._session.close()
        self._ray = None

    def _connected(self) -> Any:
        """The ray module, connected to a cluster: whoever has a connection already shares it."""
        if self._ray is not None:
            return self._ray
        try:
            import ray
        except ImportError:
            raise BadInput(f"--executor ray needs the package ray: {RAY_INSTALL}") from None
        if not ray.is_initialized():
            for name, value in QUIET.items():
                os.environ.setdefault(name, value)
            address = self.address or os.environ.get("RAY_ADDRESS")
            try:
                _check_answers(address)
                ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, ValueError, RuntimeError) as error:
                raise BadInput(
                    f"no Ray cluster at {address or 'this machine'} ({error}): start one with `ray start "
                    "--head`, or leave out --ray-address; if it wants a token, set RAY_AUTH_MODE=token"
                ) from None
            self._session.callback(ray.shutdown)
        self._session.enter_context(_quiet(ray))
        self._ray = ray
        return ray


@contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Ray prints a page to stdout whenever a worker dies, whatever its options say; we tell it ourselves."""
    module = ray._private.worker
    before = getattr(module, "_worker_logs_enabled", None)
    module._worker_logs_enabled = False
    try:
        yield
    finally:
        module._worker_logs_enabled = before


class _Crew:
    """The workers of one `compute`, and what each of them is doing."""

    def __init__(
        self, executor: RayExecutor, hire: Callable[[], Any], size: int, jobs: Sequence[Any]
    ) -> None:
        self.executor = executor
        self.ray = executor._ray
        self.hire = hire
        self.size = size
        self.jobs = jobs
        self.todo = deque(range(len(jobs)))
        self.open = set(self.todo)  # neither finished nor lost
        self.deaths: Counter[int] = Counter()
        self.false_starts = 0
        self.doing: dict[Any, tuple[Any, int | None]] = {}  # future -> (worker, job, or None: starting)
        self.idle: list[Any] = []

    def results(self) -> Iterator[tuple[int, Any]]:
        for _ in range(self.size):
            self._hire()
        while self.open:
            self._assign()
            ready, _ = self.ray.wait(list(self.doing), timeout=PATIENCE)
            if not ready:
                self._check_hope()
            for future in ready:
                yield from self._finish(future)

    def dismiss(self) -> None:
        """End all workers, whatever they are doing."""
        for worker in {*self.executor.pids, *self.idle, *(worker for worker, _ in self.doing.values())}:
            self._fire(worker)

    def _hire(self) -> None:
        worker = self.hire()
        self.doing[worker.start.remote()] = (worker, None)

    def _fire(self, worker: Any) -> None:
        self.executor.pids.pop(worker, None)
        with suppress(Exception):  # it may be dead, or the cluster gone
            self.ray.kill(worker)

    def _assign(self) -> None:
        """Give idle workers the next jobs, but none too far ahead of the first open one."""
        while self.idle and self.todo and self.todo[0] < min(self.open) + AHEAD * self.size:
            worker, index = self.idle.pop(), self.todo.popleft()
            self.doing[worker.compute.remote(self.jobs[index])] = (worker, index)

    def _finish(self, future: Any) -> Iterator[tuple[int, Any]]:
        worker, index = self.doing.pop(future)
        try:
            value = self.ray.get(future)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, KvbenchError) else error from None
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.RaySystemError) as error:
            yield from self._mourn(worker, index, str(error))
            return
        self.idle.append(worker)
        if index is None:
            self.executor.pids[worker] = value
            self.false_starts = 0
            return
        result, peak = value
        self.executor.peak = max(self.executor.peak, peak)
        self.open.discard(index)
        yield index, result

    def _mourn(self, worker: Any, index: int | None, reason: str) -> Iterator[tuple[int, Any]]:
        """A worker has died: its job goes to another one, unless too many have died over it."""
        self._fire(worker)
        told = _first_words(reason)
        if index is None:
            self.false_starts += 1
            if self.false_starts >= TRIES:
                raise WorkersLost(
                    f"{TRIES} workers died one after the other while they loaded the model ({told}): is "
                    "there memory for it on every machine? Use fewer --workers, or a smaller model"
                )
        else:
            self.deaths[index] += 1
            if self.deaths[index] >= TRIES:
                self.open.discard(index)
                yield index, LostJob(f"its worker died {TRIES} times, the last time so: {told}")
            else:
                self.todo.appendleft(index)
        if len(self.doing) + len(self.idle) < min(self.size, len(self.open)):
            self._hire()

    def _check_hope(self) -> None:
        """Raise where no machine is left that could take a worker."""
        threads = self.executor.facts()["threads"]
        if not any(node["Resources"].get("CPU", 0) >= threads for node in _nodes(self.ray)):
            raise WorkersLost(
                f"no machine of the Ray cluster can take a worker of {threads} threads any more; "
                "finished work is kept: repair the cluster and run the same command again"
            )


def _check_answers(address: str | None) -> None:
    """Ray waits minutes for a cluster that is not there. Raises OSError where no one listens at HOST:PORT."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


def _nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _gpus(counts: Sequence[float], workers: int | None, spread: bool) -> int:
    """GPUs of each worker: 1, or for a spread model a machine's, shared by its part of the workers."""
    if not spread:
        return 1
    machines = [int(count) for count in counts if count >= 1]
    per_machine = -(-(workers or len(machines)) // len(machines))
    return max(1, min(machines) // per_machine)


def _size(nodes: Sequence[Mapping[str, Any]], workers: int | None, gpus: int) -> tuple[int, int]:
    """How many workers, and with how many threads each.

    Threads: OMP_NUM_THREADS of this process, else as many as the cluster's cores allow.
    Raises BadInput for more workers than the cluster has room for.
    """
    cores = [int(node["Resources"].get("CPU", 0)) for node in nodes]
    if workers is None:
        held = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        workers = sum(count // gpus for count in held) if gpus else len([count for count in cores if count])
    fixed = os.environ.get("OMP_NUM_THREADS", "")
    choices = [int(fixed)] if fixed.isdigit() else range(max(cores, default=0), 0, -1)
    for threads in choices:
        if sum(count // threads for count in cores) >= workers > 0:
            return workers, threads
    told = f"{fixed} threads (OMP_NUM_THREADS) each" if fixed.isdigit() else "1 thread each"
    raise BadInput(f"--workers {workers} with {told}: the Ray cluster has only {sum(cores)} cores")


def _first_words(text: str) -> str:
    """What Ray says about a death, without its page of advice."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cause = next((line for line in lines if "died because" in line or "dead because" in line), lines[0])
    return cause.split(". ")[0][:200]
