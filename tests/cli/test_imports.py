"""Commands that need no model answer at once: they import nothing that takes long and is not needed.

Each command runs in a process of its own. What is imported is checked, not the time: that differs by machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.show.plot import plot
from tests.store.synthetic import make_run

MODEL = {"torch", "transformers", "lm_eval", "datasets", "tokenizers", "safetensors"}
NUMBERS = {"numpy", "pandas", "pyarrow"}
DRAWING = {"matplotlib", "matplotlib.pyplot", "PIL", "jinja2"}
SLOW = {"scipy", "scipy.stats", "ray", "IPython"}
SCRIPT = """
import json, sys
from kvbench.cli.main import main
sys.argv = ["kvbench", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a figure in it."""
    folder = make_run(tmp_path_factory.mktemp("run"), samples=4)
    plot(folder, "kl")
    return folder


def imported(*command: str) -> set[str]:
    started = [sys.executable, "-c", SCRIPT, json.dumps(command)]
    done = subprocess.run(started, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("command", ["table", "compare", "verify"])
def test_stored_results_are_read_without_a_model_and_without_drawing(run: Path, command: str) -> None:
    assert imported(command, str(run)) & (MODEL | DRAWING | SLOW) == set()


@pytest.mark.parametrize("command", ["plot", "report"])
def test_figures_and_pages_need_no_model(run: Path, tmp_path: Path, command: str) -> None:
    found = imported(command, str(run), "--out", str(tmp_path / "out"))
    assert found & (MODEL | SLOW | {"matplotlib.pyplot"}) == set()


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["plot", "--help"], ["--version"]])
def test_help_loads_nothing(command: list[str]) -> None:
    assert imported(*command) & (MODEL | NUMBERS | DRAWING | SLOW) == set()


def test_listing_models_loads_none() -> None:
    assert imported("list", "models") & (MODEL | NUMBERS | DRAWING | SLOW) == set()


def test_listing_tasks_loads_no_model() -> None:
    found = imported("list", "tasks")
    assert found & (MODEL | DRAWING | SLOW) <= {"datasets"}  # which looks into a cache that has one of them


@pytest.mark.parametrize("command", [["list", "policies"], ["list", "figures"], ["info", "snapkv"]])
def test_listing_policies_loads_no_model_and_no_torch(command: list[str]) -> None:
    assert imported(*command) & (MODEL | DRAWING | SLOW | {"pandas"}) <= {"safetensors"}


def test_a_policy_that_needs_parts_of_torch_is_listed(tmp_path: Path) -> None:
    """Its module imports with torch, however it asks for it: by name, by part, or for a base class."""
    script = """
import sys
from kvbench.cli.lazy_torch import without_torch
from kvbench.errors import PluginError

def load():
    try:
        import torch
        from torch.nn import functional
        from torch import Tensor
    except ImportError as error:
        raise PluginError(str(error)) from error
    assert isinstance(torch.ones(2), Tensor) and functional.relu(torch.ones(2)).sum() == 2
    return torch.nn.Module

found = without_torch(load)
import torch
assert found is torch.nn.Module
assert without_torch(lambda: torch.Tensor) is torch.Tensor
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "kvbench", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("kvbench ")
