"""Traces that all tests of JudgeQ share."""

from __future__ import annotations

import pytest

from kvbench.learn.trace import TraceSet
from kvbench.model.open import LoadedModel
from kvbench.policies.judgeq.lesson import model_of
from tests.judgeq import make


@pytest.fixture(scope="package")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return make.recorded(tmp_path_factory.mktemp("judgeq"))


@pytest.fixture(scope="package")
def lm(traces: TraceSet) -> LoadedModel:
    return model_of(traces)
