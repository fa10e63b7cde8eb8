"""A short soak; `make soak` kills 50 times."""

from __future__ import annotations

from pathlib import Path

from tests.faults.soak import soak


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """B54: nothing lost, nothing twice, nothing different."""
    found = soak(tmp_path, kills=4, seeds=1)
    assert (found.rows, found.lost, found.doubled, found.changed) == (20 * 5, 0, 0, 0)
