"""Images of few dots: their content is looked at elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.show.canvas.COMPACT", 30)
