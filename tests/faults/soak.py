"""Kills a run at random moments and compares what remains with a run that nobody disturbed.

    python -m tests.faults.soak --kills 50

Each attempt is a process of its own (forked, so that libraries load once). It is killed with SIGKILL a random
time after it began, or after it stored a sample. When the kills are used up, one more attempt finishes the
run. Every row must be there once and equal to the undisturbed run's, times aside.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import kvbench
from kvbench.audit.verify import verify
from kvbench.store.results import stored_rows
from tests.laws import toy
from tests.tiny import tiny_model, tiny_tokenizer

TASK = "laws_toy:ids=0123456789"


@dataclass(frozen=True)
class Soak:
    """kills: processes that were killed while they ran. lost, doubled, changed: rows, none of which may be.

    torn: kills that left half a row. moments: different numbers of stored rows at which kills struck.
    """

    kills: int
    rows: int
    lost: int
    doubled: int
    changed: int
    torn: int
    moments: int


def soak(folder: Path, kills: int, seeds: int, seed: int = 0) -> Soak:
    """Run, kill, and compare. folder: an empty one. seeds: of the run, 20 samples each."""
    torch.set_num_threads(1)  # a forked process waits forever for threads that its parent had
    tiny_model("llama", "sdpa").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    whole = kvbench.RunConfig(
        policies=("knorm", "random"), tasks=(TASK, f"{TASK},kind=generate"), budgets=(8, 20), device="cpu",
        seeds=tuple(range(seeds)), model=str(folder / "model"), out=str(folder / "whole"),
    )  # fmt: skip
    with toy.added():  # loads every library, so that the forked processes need not
        kvbench.run(replace(whole, out=str(folder / "first"), limit=1, seeds=()), progress=False)
    total, start = _seconds(whole), _seconds(whole)  # the second finds every row and computes nothing
    each = max(total - start, 0) / (20 * seeds)
    spoilt, rows = replace(whole, out=str(folder / "killed")), folder / "killed" / "rows.jsonl"
    draw, moments = random.Random(seed), set()
    for done in range(kills):
        before = _size(rows)
        process = _attempt(spoilt)
        if draw.random() < 0.5:
            while _size(rows) == before and process.is_alive():
                time.sleep(0.001)
            process.join(timeout=draw.uniform(0, each))
        else:
            process.join(timeout=draw.uniform(0, start + each))
        if process.exitcode is not None:
            raise RuntimeError(f"the run ended after {done} of {kills} kills: give it more samples")
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        moments.add(_size(rows))
    last = _attempt(spoilt)
    last.join()
    assert last.exitcode == 0
    return _compared(folder, kills, len(moments))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _seconds(config: kvbench.RunConfig) -> float:
    started = time.perf_counter()
    process = _attempt(config)
    process.join()
    assert process.exitcode == 0
    return time.perf_counter() - started


def _attempt(config: kvbench.RunConfig) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=_run, args=(config,))
    process.start()
    return process


def _run(config: kvbench.RunConfig) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with toy.added():
        kvbench.run(config, progress=False)


def _compared(folder: Path, kills: int, moments: int) -> Soak:
    expected, found = (
        [
            {name: value for name, value in row.as_dict().items() if name != "times"}
            for row in stored_rows(folder / name)[0]
        ]
        for name in ("whole", "killed")
    )
    here = {row["key"]: row for row in found}
    wanted = {row["key"]: row for row in expected}
    faults = [item for item in verify([folder / "killed"]) if not item.passed]
    assert not faults, faults
    torn = folder / "killed" / "rows.torn"
    return Soak(
        kills=kills,
        rows=len(wanted),
        lost=len(wanted.keys() - here.keys()),
        doubled=len(found) - len(here),
        changed=sum(here[key] != wanted[key] for key in wanted.keys() & here.keys()),
        moments=moments,
        torn=torn.read_bytes().count(b"\n") if torn.exists() else 0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        found = soak(Path(folder), given.kills, seeds=-(-given.kills // 10), seed=given.seed)
    print(f"{found} in {time.perf_counter() - started:.0f} s")
    raise SystemExit(bool(found.lost or found.doubled or found.changed))


if __name__ == "__main__":
    main()
