"""Traces that all tests of JudgeQ share."""

from __future__ import annotations

import pytest

from kvbench.models import LoadedModel
from kvbench.policies.judgeq.lesson import model_of
from kvbench.trace import TraceSet
from tests.judgeq import make


@pytest.fixture(scope="package")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return make.recorded(tmp_path_factory.mktemp("judgeq"))


@pytest.fixture(scope="package")
def lm(traces: TraceSet) -> LoadedModel:
    return model_of(traces)
