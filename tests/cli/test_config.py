"""What a configuration takes from Python: numpy numbers and paths, and no number that a row cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.errors import BadInput, place_of
from kvbench.study.config import RunConfig

GOOD: dict[str, Any] = {"policies": "knorm", "tasks": "needle", "budgets": (64,)}


def test_numpy_and_paths_are_plain_values_afterwards(tmp_path: Path) -> None:
    given: dict[str, Any] = {**GOOD, "budgets": np.array([64, 20]), "limit": np.int64(3), "out": tmp_path}
    config = RunConfig(**given)
    assert (config.budgets, config.limit, config.out) == ((20, 64), 3, str(tmp_path))
    assert {type(value) for value in (*config.budgets, config.limit)} == {int}
    assert config == RunConfig(**{**GOOD, "budgets": [64, 20], "limit": 3, "out": str(tmp_path)})


@pytest.mark.parametrize(
    "bad",
    [
        {"budgets": (2**63,)}, {"budgets": (0,)}, {"budgets": (True,)}, {"budgets": (20.0,)},
        {"budgets": 0.5}, {"chunk": 2**63}, {"limit": 0}, {"limit": 1.5}, {"seed": -1},
        {"pins": "\u0664,16"}, {"pins": "4,\u00b2"},
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(BadInput, match=name.removesuffix("s")):
        RunConfig(**{**GOOD, **bad})


def test_an_error_says_where_the_plugins_code_is() -> None:
    with pytest.raises(ValueError, match="reshape") as caught:
        np.zeros(2).reshape(3)
    assert place_of(caught.value).startswith(" (test_config.py, line ")
