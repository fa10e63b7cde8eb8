"""Figures without their files: the numbers alone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure


@contextmanager
def unsaved(*modules: ModuleType) -> Iterator[dict[str, pd.DataFrame]]:
    """What these modules would save inside the block: {name of the figure: numbers as they are read back}."""
    kept: dict[str, pd.DataFrame] = {}

    def keep(fig: Figure, folder: Path, name: str, lines: pd.DataFrame, **options: Any) -> list[Path]:
        assert fig.axes
        kept[name] = pd.read_csv(io.StringIO(lines.to_csv(index=False)))
        return []

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "save", keep)
        yield kept
