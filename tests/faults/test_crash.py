"""Full disks, folders that cannot be written, two runs at once, clocks that jump, code that raises."""

from __future__ import annotations

import errno
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

import kvbench
from kvbench.cli import main as cli
from kvbench.errors import StoreError, UnsupportedModel
from kvbench.learn.trace import TraceSet, TraceWriter
from kvbench.store import manifest
from kvbench.store.results import Store
from tests.laws import toy
from tests.laws.runs import by_key, config, lines, python, recorded

FEW: dict[str, Any] = {"policies": ("knorm",), "tasks": ("laws_toy",), "budgets": (8,)}

# No file may grow beyond 6000 bytes: the kernel refuses in the middle of a row, as a full disk does.
SMALL_DISK = """
import resource, signal
from kvbench import RunConfig, errors, run
from tests.laws import toy
toy.add()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
try:
    run({config!r}, progress=False)
except errors.StoreError as error:
    print(error)
"""


@pytest.mark.usefixtures("toys")
def test_a_disk_that_fills_up_loses_nothing(folder: str, tmp_path: Path) -> None:
    settings = config(folder, tmp_path / "run", **FEW)
    done = python(SMALL_DISK.format(config=settings))
    assert "free space and run the same command again, finished samples are kept" in done.stdout, done.stderr
    before = lines(tmp_path / "run")
    assert 0 < len(before) < 8
    recorded(settings)
    recorded(config(folder, tmp_path / "whole", **FEW))
    assert lines(tmp_path / "run")[: len(before)] == before
    assert by_key(lines(tmp_path / "run")) == by_key(lines(tmp_path / "whole"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.usefixtures("toys")
def test_a_folder_that_cannot_be_written_is_refused_first(folder: str, tmp_path: Path, code: int) -> None:
    """Before the model is even opened; the message names the folder and the option."""

    def refuse(self: Path, *args: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code), str(self))

    with (
        patch.object(Path, "touch", refuse),
        patch.object(kvbench.model.open, "open_model", side_effect=AssertionError("too late")),
        pytest.raises(StoreError, match=rf"cannot write to .*{os.strerror(code)}.*--out"),
    ):
        kvbench.run(config(folder, tmp_path / "run", **FEW), progress=False)


@pytest.mark.usefixtures("toys")
def test_a_manifest_that_cannot_be_written_leaves_the_old_one(folder: str, tmp_path: Path) -> None:
    settings = config(folder, tmp_path, **FEW)
    recorded(settings)
    before = (tmp_path / "manifest.json").read_bytes()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        patch.object(manifest.os, "replace", side_effect=full),
        pytest.raises(StoreError, match="No space left"),
    ):
        recorded(config(folder, tmp_path, **FEW | {"policies": ("tova",)}))
    assert (tmp_path / "manifest.json").read_bytes() == before
    assert recorded(settings)[0].failed == 0


@pytest.mark.usefixtures("toys")
def test_the_second_run_in_a_folder_is_refused(folder: str, tmp_path: Path) -> None:
    recorded(config(folder, tmp_path, **FEW))
    before = (tmp_path / "rows.jsonl").read_bytes()
    fixed = manifest.read_manifest(tmp_path)["fixed"]
    command = ["run", "--policy", "knorm", "--task", "laws_toy", "--budgets", "20"]
    command += ["--model", folder, "--device", "cpu", "--out", str(tmp_path)]
    with Store.open(tmp_path, fixed, {}):
        done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == cli.REFUSED
    assert f"{tmp_path} is in use by another run: wait until it ends" in done.stderr
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert CliRunner().invoke(cli.app, command).exit_code == 0


@pytest.mark.usefixtures("toys")
def test_a_clock_that_jumps_back_changes_no_row(folder: str, tmp_path: Path) -> None:
    """Only the manifest knows the time of day; what is measured uses a clock that cannot be set."""
    recorded(config(folder, tmp_path / "whole", **FEW))
    recorded(config(folder, tmp_path / "run", **FEW, limit=2))
    with patch.object(manifest, "datetime") as clock:
        clock.now.return_value = datetime(1970, 1, 1, tzinfo=UTC)
        recorded(config(folder, tmp_path / "run", **FEW))
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    started = [run["started"] for run in manifest.read_manifest(tmp_path / "run")["runs"]]
    assert started[1] < started[0]
    source = Path(kvbench.__file__).parent
    uses = {
        file.name
        for file in source.rglob("*.py")
        if re.search(r"time\.time\(|datetime\.now|utcnow", file.read_text())
    }
    assert uses == {"manifest.py"}


@pytest.mark.usefixtures("toys")
def test_any_error_of_a_policy_fails_its_own_rows_only(folder: str, tmp_path: Path) -> None:
    """Also one of kvbench's own errors, which elsewhere stops a command."""
    refusal = UnsupportedModel("not with these layers")
    with patch.object(toy.Faulty, "score", side_effect=refusal):
        result, _ = recorded(config(folder, tmp_path, **FEW | {"policies": ("knorm", "laws_faulty")}))
    failed = result.rows[result.rows["status"] == "failed"]
    assert set(failed["spec"]) == {"laws_faulty"}
    assert set(failed["reason"]) == {"policy 'laws_faulty': not with these layers"}
    assert (result.rows["status"] == "ok").sum() == 8


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (lambda self, sample, answer: 1 / 0, "failed to score sample '1': ZeroDivisionError"),
        (lambda self, sample, answer: {"accuracy": float("nan")}, "sample '1': accuracy is nan"),
        (lambda self, sample, answer: {"accuracy": "yes"}, "sample '1': accuracy is 'yes'"),
        (lambda self, sample, answer: None, "failed to score sample '1': TypeError"),
    ],
)
@pytest.mark.usefixtures("toys")
def test_a_task_that_cannot_score_one_sample(folder: str, tmp_path: Path, score: Any, told: str) -> None:
    good = toy.Toy.score

    def sometimes(self: toy.Toy, sample: Any, answer: Any) -> Any:
        return score(self, sample, answer) if sample.id == "1" else good(self, sample, answer)

    with patch.object(toy.Toy, "score", sometimes):
        result, _ = recorded(config(folder, tmp_path, **FEW))
    failed = result.rows[result.rows["status"] == "failed"]
    assert set(failed["sample"]) == {"1"}
    assert all(told in reason and "task 'laws_toy'" in reason for reason in failed["reason"])
    assert recorded(config(folder, tmp_path, **FEW))[0].failed == 0  # repaired, and tried again


@pytest.mark.usefixtures("toys")
def test_a_task_that_cannot_make_samples_is_named(folder: str, tmp_path: Path) -> None:
    with (
        patch.object(toy.Toy, "samples", side_effect=KeyError("column")),
        pytest.raises(
            kvbench.errors.PluginError, match="task 'laws_toy' failed to make its samples: KeyError"
        ),
    ):
        recorded(config(folder, tmp_path, **FEW))


def test_files_that_fail_elsewhere_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.store import results

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")

    monkeypatch.setattr(results, "read_rows", full)
    done = CliRunner().invoke(cli.app, ["table", "x"])
    assert done.exit_code == cli.REFUSED
    assert done.stderr == "error: /some/file: No space left on device\n"


def test_a_damaged_trace_is_named(tmp_path: Path) -> None:
    import torch

    from kvbench.learn.trace import TraceInfo

    header = {"model": "m", "model_sha256": "0", "layers": 1, "kv_heads": 1, "head_dim": 2}
    writer = TraceWriter(tmp_path, header)
    writer.add(TraceInfo("a", 3, 2, "t", 1.0), [tuple(torch.ones(1, 3, 2) for _ in "qkv")])
    writer.flush()
    file = tmp_path / "shard-0000" / "layer-00.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(
        StoreError, match=r"layer-00.safetensors is damaged or cut off.*make the traces again"
    ):
        TraceSet(tmp_path)[0].layer(0)


@pytest.mark.usefixtures("toys")
def test_a_task_that_cannot_name_a_label_is_named(folder: str, tmp_path: Path) -> None:
    with (
        patch.object(toy.Toy, "label", side_effect=IndexError("gold")),
        pytest.raises(kvbench.errors.PluginError, match="task 'laws_toy' failed to label sample '0': IndexE"),
    ):
        recorded(config(folder, tmp_path, **FEW))
