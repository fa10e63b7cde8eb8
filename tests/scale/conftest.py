"""A model folder for the tests of speed and scale."""

from __future__ import annotations

import pytest

from tests.laws.conftest import saved


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny Llama as a model folder."""
    return saved(tmp_path_factory.mktemp("model"), chat=False, bos=False)
