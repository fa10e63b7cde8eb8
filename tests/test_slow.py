"""The list of slow tests names tests that are there."""

from __future__ import annotations

import re

import pytest

from tests.slow import ROOT, SLOW


@pytest.mark.parametrize("name", SLOW)
def test_what_is_called_slow_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).glob("test_*.py"))
    assert files
    found = {one for file in files for one in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.M)}
    assert any(one.startswith(test) for one in found)
