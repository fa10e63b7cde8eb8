"""bfloat16 against float32, on the CPU: sizes are exact, scores are float32, numbers are near.

Tolerances, on random models of 4 layers: 95% of the kept pairs are the same, the missed mass differs by
less than 0.01, and where the kept pairs are the same the likelihood of the reference differs by less than
0.05 nats per token. What does not look at the model's numbers keeps the same pairs. One exception: after
a QK-norm of equal weights all keys are of one length, and knorm ranks what rounding left of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvbench.engine import ranking as loop
from kvbench.model.open import LoadedModel
from tests.laws.lab import SCHEDULES, SPECS, Positions, cells_of, loaded, prompt_of, try_out
from tests.tiny import tiny_model

BLIND = ("random", "streaming_llm")  # their scores look at positions and draws alone
SHARED, MASS, NATS = 0.95, 0.01, 0.05


def rounded(arch: str) -> LoadedModel:
    kind = torch.bfloat16
    return replace(loaded(arch), model=tiny_model(arch).to(kind), dtype=kind)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_near_float32(arch: str, schedule: str) -> None:
    cells = cells_of(SPECS, (33,), schedule)
    full = try_out(loaded(arch), prompt_of(), cells)
    seen: list[torch.dtype] = []
    original = loop.score_and_flag

    def spy(policy: Any, observation: Any) -> tuple[torch.Tensor, torch.Tensor]:
        score, finite = original(policy, observation)
        seen.append(score.dtype)
        return score, finite

    with patch.object(loop, "score_and_flag", spy):
        half = try_out(rounded(arch), prompt_of(), cells)
    assert set(seen) == {torch.float32}
    assert half.done.full.outcome.nll == pytest.approx(full.done.full.outcome.nll, abs=NATS)
    for cell in cells:
        assert half[cell].kept == 33
        assert half[cell].kv_bytes * 2 == full[cell].kv_bytes
        assert half[cell].missed_mass == pytest.approx(full[cell].missed_mass, abs=MASS), cell.spec
        same = shared(full.kept(cell), half.kept(cell))
        if same == 1:
            assert half[cell].outcome.nll == pytest.approx(full[cell].outcome.nll, abs=NATS), cell.spec
        if cell.spec in BLIND:
            assert same == 1, cell.spec
        if (arch, cell.spec) != ("qwen3", "knorm"):
            assert same >= SHARED, cell.spec


def shared(one: Positions, other: Positions) -> float:
    """Share of the kept pairs that two rows have in common."""
    heads = [(a, b) for layers in zip(one, other, strict=True) for a, b in zip(*layers, strict=True)]
    return float(torch.stack([torch.isin(a, b).float().mean() for a, b in heads]).mean())
