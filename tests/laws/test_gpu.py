"""On a CUDA device: kept sets and answers of the CPU in float32; bfloat16 runs and is exact in size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.laws.lab import SCHEDULES, SPECS, cells_of, prompt_of, try_out
from tests.tiny import tiny_loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, none is here"),
]


def on_gpu(dtype: torch.dtype) -> Any:
    lm = tiny_loaded("llama")
    return replace(lm, model=lm.model.to("cuda", dtype), device=torch.device("cuda"), dtype=dtype)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float32_keeps_what_the_cpu_keeps(schedule: str) -> None:
    cells = cells_of(SPECS, (8, 33), schedule)
    here = try_out(tiny_loaded("llama"), prompt_of(), cells)
    there = try_out(on_gpu(torch.float32), prompt_of(), cells)
    for cell in cells:
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here.kept(cell), there.kept(cell), strict=True))
        assert here[cell].outcome.answer.text == there[cell].outcome.answer.text
        assert here[cell].outcome.nll == pytest.approx(there[cell].outcome.nll, abs=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16_keeps_exactly_the_budget(schedule: str) -> None:
    cells = cells_of(SPECS, (8, 33), schedule)
    done = try_out(on_gpu(torch.bfloat16), prompt_of(), cells)
    assert {(cell.budget, done[cell].kept) for cell in cells} == {(8, 8), (33, 33)}
    assert all(done[cell].outcome.nll == done[cell].outcome.nll for cell in cells)
