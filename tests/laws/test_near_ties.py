"""`kvbench rerun` tells a near-tie that fell the other way from a row that is different."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.audit.rerun import rerun
from kvbench.contract.observation import Observation
from kvbench.engine.near_ties import NEAR
from kvbench.policies.knorm import KNorm
from tests.laws import toy
from tests.laws.runs import config

TASK = "laws_toy:kind=generate,ids=2"
BUDGET = 9  # of a context of even length: the cut goes through a pair of tied tokens, the newer one stays


def pairs(self: KNorm, seen: Observation) -> Tensor:
    """Two neighbours have one score; later pairs have a higher one."""
    return (seen.positions // 2 + 1).float()


def tilted(by: float) -> object:
    """The same, but in one KV head of one layer the older of the two at the cut is ahead, if only just."""

    def score(self: KNorm, seen: Observation) -> Tensor:
        assert seen.seen % 2 == 0
        older = (seen.positions == seen.seen - BUDGET - 1) & (seen.full_index == 1)
        older[:, 1:] = False
        return pairs(self, seen) * torch.where(older, 1 + by, 1.0)

    return score


@pytest.fixture
def measured(folder: str, tmp_path: Path) -> object:
    def measure(by: float) -> Path:
        with patch.object(KNorm, "score", tilted(by)):
            settings = config(folder, tmp_path / "run", policies=("knorm",), tasks=(TASK,), budgets=(BUDGET,))
            kvbench.run(settings, progress=False)
        return tmp_path / "run"

    return measure


@pytest.mark.parametrize(("by", "near"), [(NEAR / 10, True), (1.0, False)])
def test_a_near_tie_is_told_from_a_difference(measured: object, by: float, near: bool) -> None:
    """One other token in one head, because of rounding; and other tokens for another reason."""
    with toy.added():
        path = measured(by)  # type: ignore[operator]
        with patch.object(KNorm, "score", pairs):
            report = rerun(path, progress=False)
    assert report.equal == 1  # the full cache
    assert (len(report.near_ties), len(report.different)) == ((1, 0) if near else (0, 1))
    if near:
        assert "a near-tie fell the other way (layer 1, KV head 0: position" in report.text()
        assert "1 after a near-tie that fell the other way, 0 different" in report.text()
    else:
        assert "near-tie fell" not in report.text().partition("different")[2]
