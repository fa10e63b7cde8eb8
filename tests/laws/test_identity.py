"""Law 11: a new axis at its default changes no key; other values have keys of their own, everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import kvbench
from kvbench.audit.rerun import rerun
from kvbench.audit.speed.measure import SpeedConfig, speed
from kvbench.audit.verify import verify
from kvbench.contract import identity
from kvbench.contract.cell import Cell
from kvbench.contract.identity import AXES, Axis, config_of, family_of
from kvbench.learn.eviction_error import ErrorConfig, measure
from kvbench.model.open import OpenModel
from kvbench.store.results import ROWS, read_rows
from tests.kvp import make
from tests.laws import toy
from tests.laws.runs import config, lines, recorded

FEW: dict[str, Any] = {"policies": ("knorm",), "tasks": ("laws_toy",), "budgets": (8,), "limit": 2}


@pytest.fixture(scope="module")
def before(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, recorded traces' errors and speeds, all measured before the axis exists."""
    out = tmp_path_factory.mktemp("before")
    with toy.added():
        recorded(config(folder, out / "run", **FEW))
    errors(out)
    speeds(folder, out)
    return out


def errors(out: Path) -> None:
    traces = out / "traces"
    if not traces.exists():
        make.synthetic(traces, count=1)
    measure(ErrorConfig(str(traces), ("knorm",), budgets=(8,), out=str(out / "errors")), progress=False)


def speeds(folder: str, out: Path) -> None:
    speed(
        SpeedConfig(("knorm",), (40,), 8, 2, 1, model=folder, device="cpu", out=str(out / "speeds")),
        progress=False,
    )


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Adds a hypothetical axis as the docstring of `contract.identity` says; sets the value of every cell."""
    values = Cell.as_dict

    def allocate(value: str) -> None:
        monkeypatch.setattr(Cell, "as_dict", lambda cell: {**values(cell), "allocation": value})

    monkeypatch.setattr(identity, "AXES", (*AXES, Axis("allocation", str, default="uniform")))
    allocate("uniform")
    with toy.added():
        yield allocate


def keys(folder: Path) -> list[str]:
    return [row["key"] for row in lines(folder)]


def faults(folder: Path) -> list[str]:
    return [f"{item.law}: {item.detail}" for item in verify([folder], sources=True) if not item.passed]


def test_at_its_default_nothing_is_computed_again(
    folder: str, before: Path, tmp_path: Path, grown: Callable[[str], None]
) -> None:
    out = Path(shutil.copytree(before, tmp_path / "copy"))
    told = {name: (out / name / ROWS).read_bytes() for name in ("run", "errors", "speeds")}
    with patch.object(OpenModel, "load", side_effect=AssertionError("weights were read")):
        kvbench.run(config(folder, out / "run", **FEW), progress=False)
        speeds(folder, out)
    errors(out)
    assert {name: (out / name / ROWS).read_bytes() for name in told} == told
    assert faults(out / "run") == []
    assert set(read_rows(out / "run")["allocation"]) == {"uniform"}  # old rows say what they were


def test_rows_at_the_default_are_written_as_before(
    folder: str, before: Path, tmp_path: Path, grown: Callable[[str], None]
) -> None:
    """An older kvbench reads them; and a repetition finds them equal bit for bit."""
    recorded(config(folder, tmp_path / "again", **FEW))
    assert lines(tmp_path / "again") == lines(before / "run")
    report = rerun(before / "run", progress=False)
    assert (report.equal, report.close, report.different, report.missing) == (4, 0, {}, [])


def test_another_value_has_rows_of_its_own(
    folder: str, before: Path, tmp_path: Path, grown: Callable[[str], None]
) -> None:
    out = Path(shutil.copytree(before, tmp_path / "copy"))
    old = {name: keys(out / name) for name in ("run", "errors", "speeds")}
    grown("pyramid")
    result, _ = recorded(config(folder, out / "run", **FEW))
    errors(out)
    speeds(folder, out)
    for name, earlier in old.items():
        now = keys(out / name)
        assert now[: len(earlier)] == earlier
        assert len(now) == len(set(now)) == 2 * len(earlier)
    assert set(result.rows["allocation"]) == {"pyramid"}
    assert faults(out / "run") == []
    with patch.object(OpenModel, "load", side_effect=AssertionError("weights were read")):
        kvbench.run(config(folder, out / "run", **FEW), progress=False)  # resume finds both
    report = rerun(out / "run", out=tmp_path / "again", progress=False)
    assert (report.equal, report.different) == (4, {})
    assert sorted(report.missing) == sorted(old["run"])  # those at the default: this Cell has none any more

    def relabel(line: str) -> str:
        return json.dumps({**json.loads(line), "allocation": "even"})

    text = (out / "run" / ROWS).read_text().splitlines()
    (out / "run" / ROWS).write_text("".join(relabel(line) + "\n" for line in text))
    assert any("do not give config" in told for told in faults(out / "run"))


def test_every_axis_changes_the_key() -> None:
    plain = {axis.name: "a" for axis in AXES}
    hashes = {axis.name: config_of({**plain, axis.name: "b"}) for axis in AXES}
    assert len({config_of(plain), *hashes.values()}) == len(AXES) + 1
    assert family_of({**plain, "seed": 1}, False) == family_of({**plain, "seed": 2}, False)
    assert family_of({**plain, "data_sha256": "b"}, False) != family_of(plain, False)
    assert family_of({**plain, "data_sha256": "b"}, True) == family_of(plain, True)


def test_keys_are_those_of_the_first_release() -> None:
    """A row of results/reference/needle-1024: its key must never change."""
    settings = {
        "policy": "keydiff", "params": {}, "budget": 64, "pins": [4, 16], "schedule": "prefill",
        "chunk": None, "weights": "", "task": "needle", "task_params": {"length": 1024, "max_new_tokens": 16},
        "model": "smollm2-135m", "question": "withheld", "template": "chat", "seed": 0,
        "model_sha256": "79fb92b3c95fec602edd7e782151ba0722701bf02c452fce637072855e65db78",
        "dtype": "torch.float32", "data_sha256": "f3df61ffe3b57c51",
    }  # fmt: skip
    assert config_of(settings) == "932e13492c1220c6"
    assert identity.key_of("932e13492c1220c6", "0-0") == "de5aed64751b38c3"
