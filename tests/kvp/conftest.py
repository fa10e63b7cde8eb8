"""A model folder, and a task made of sentences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbench.learn.trace import TraceSet
from tests.kvp import make


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny Llama as a model folder."""
    return make.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def story() -> Iterator[None]:
    with make.story_added():
        yield


@pytest.fixture(scope="package")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    """Six traces whose utility is a function of the key."""
    return make.synthetic(tmp_path_factory.mktemp("traces"))
