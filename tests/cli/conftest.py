"""An installed third-party package, without pip and without network."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parents[1] / "plugin_fixture"


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with the fixture package as an installer would leave it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(FIXTURE / "kvbench_plugin_fixture", folder / "kvbench_plugin_fixture")
    project = tomllib.loads((FIXTURE / "pyproject.toml").read_text())["project"]
    write_distribution(folder, project["name"], project["entry-points"]["kvbench.policies"])
    return folder


def write_distribution(folder: Path, name: str, policies: dict[str, str]) -> None:
    """The metadata of an installed distribution that registers policies."""
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"{key} = {target}" for key, target in policies.items()]
    (info / "entry_points.txt").write_text("\n".join(["[kvbench.policies]", *lines, ""]))
