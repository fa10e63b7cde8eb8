"""results/reference.sh holds the commands that the committed runs say they were made with."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from kvbench.store.manifest import MANIFEST, read_manifest
from tests.store.test_reference import REFERENCE, ROOT, RUNS

SCRIPT = ROOT / "results" / "reference.sh"


def commands(name: str, tmp_path: Path) -> list[str]:
    """What the script would run, told by a kvbench that only prints."""
    stub = tmp_path / "kvbench"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\037" "$word"; done\necho\n')
    stub.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPT), "results/reference", name],
        capture_output=True, text=True, check=True, env={"PATH": path},
    )  # fmt: skip
    lines = [line.strip("\037").split("\037") for line in done.stdout.splitlines()]
    return [shlex.join(line) for line in lines if line[0] == "run"]


def options(command: str) -> dict[str, str]:
    """Options of a run by name, in whatever order they were typed."""
    words = [word for word in shlex.split(command) if word not in ("kvbench", "run")]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_was_made_by_the_command_of_the_script(name: str, tmp_path: Path) -> None:
    made = [options(run["command"]) for run in read_manifest(REFERENCE / name)["runs"]]
    written = [options(command) for command in commands(name, tmp_path)]
    assert written
    for command in written:
        assert command in made, f"{name} was not made by: {command}"


def test_every_run_of_the_script_is_committed_and_none_is_unknown() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    (names,) = re.findall(r"names=\$\{\*:-(.*)\}", text)
    assert sorted(names.split()) == RUNS
    for name in RUNS:
        assert (REFERENCE / name / MANIFEST).is_file()


def test_an_unknown_name_is_refused() -> None:
    done = subprocess.run(["bash", str(SCRIPT), "results/again", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "choose from needle-1024" in done.stderr
