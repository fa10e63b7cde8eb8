"""The plugin door: a package that nobody here knows is listed, checked, and stopped when broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbench.audit import check
from kvbench.cli import describe
from kvbench.cli import main as cli
from kvbench.cli.options import FAILED, REFUSED
from kvbench.contract import registry
from kvbench.contract.policy import Policy
from kvbench.contract.registry import Registry
from tests.cli.conftest import write_distribution

BROKEN = {
    "fixture_raises": "the fixture fails on purpose",
    "fixture_nan": "NaN",
    "fixture_shape": "must be (batch, kv_head, slot)",
    "fixture_dtype": "torch.float64",
    "fixture_no_import": "module_that_is_missing",
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, plugin_folder: Path) -> Registry:
    """A policy registry of a process that started with the plugin installed."""
    monkeypatch.syspath_prepend(plugin_folder)
    return _install(monkeypatch)


def _install(monkeypatch: pytest.MonkeyPatch) -> Registry:
    policies = Registry("policy", "kvbench.policies", Policy)
    for module in (registry, check, describe):
        monkeypatch.setattr(module, "POLICIES", policies)
    return policies


def test_a_new_process_lists_plugin_and_built_ins_with_broken_ones_apart(plugin_folder: Path) -> None:
    path = os.pathsep.join(filter(None, [str(plugin_folder), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "kvbench", "list", "policies"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    working, _, broken = done.stdout.partition("broken policies")
    assert "fixture_good" in working
    assert "tests/plugin_fixture" in working
    assert "snapkv" in working
    assert "fixture_no_import" in broken
    assert "fixture_no_import" not in working
    assert "module_that_is_missing" in broken
    assert "kvbench-plugin-fixture 0.1" in broken


@pytest.mark.usefixtures("fresh")
def test_the_good_plugin_passes_the_check() -> None:
    done = CliRunner().invoke(cli.app, ["check", "fixture_good:channel=3"])
    assert done.exit_code == 0, done.output
    assert "FAIL" not in done.output


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("name", "reason"), BROKEN.items())
def test_a_broken_plugin_is_stopped_by_name(name: str, reason: str) -> None:
    done = CliRunner().invoke(cli.app, ["check", name])
    assert done.exit_code in (FAILED, REFUSED)
    assert name in done.stderr
    assert reason in done.output
    assert "Traceback" not in done.output


@pytest.mark.usefixtures("fresh")
def test_info_of_a_plugin_names_the_source_of_its_default() -> None:
    done = CliRunner().invoke(cli.app, ["info", "fixture_good"])
    assert done.exit_code == 0, done.output
    for part in ("channel", "the fixture's author", "Ranks tokens by the size of one channel", "keys"):
        assert part in done.output


def test_two_distributions_with_one_name_are_both_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugin_folder: Path
) -> None:
    write_distribution(tmp_path, "someone-else", {"fixture_good": "elsewhere:Policy"})
    monkeypatch.syspath_prepend(plugin_folder)
    monkeypatch.syspath_prepend(tmp_path)
    _install(monkeypatch)
    done = CliRunner().invoke(cli.app, ["list", "policies"])
    assert done.exit_code == REFUSED
    assert "kvbench-plugin-fixture 0.1" in done.stderr
    assert "someone-else 0.1" in done.stderr
