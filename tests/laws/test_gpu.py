"""On CUDA devices: kept sets and answers of the CPU in float32; bfloat16 runs and is exact in size; time
and memory are measured there; a model may be spread over several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbench
from kvbench.audit.speed.flops import matmul_rate
from kvbench.audit.speed.stages import run_stages
from kvbench.model.open import open_model
from tests.laws import toy
from tests.laws.lab import SCHEDULES, SPECS, cells_of, prompt_of, ranker_of, try_out
from tests.laws.runs import config
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


def test_stages_are_measured_there() -> None:
    lm = on_gpu(torch.bfloat16)
    rankers = [ranker_of(spec) for spec in SPECS if not spec.startswith("oracle")]
    passed = run_stages(lm, torch.tensor(prompt_of().context, device="cuda"), rankers, 33, 2)
    weights = sum(parameter.nbytes for parameter in lm.model.parameters())
    assert weights < passed.prefill.peak < torch.cuda.get_device_properties(0).total_memory
    for stages in passed.policies.values():
        assert not stages.failed
        assert stages.kept == 33
        assert stages.scoring.seconds > 0
        assert stages.peak > weights
    assert matmul_rate(lm.device, lm.dtype) > 1e11  # any GPU of the last ten years


def test_the_peak_of_a_run_is_what_torch_allocated(folder: str, tmp_path: Path) -> None:
    with toy.added():
        result = kvbench.run(config(folder, tmp_path, device="cuda"), progress=False)
    assert result.failed == 0
    assert result.peak == torch.cuda.max_memory_allocated() > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_spread_over_several_keeps_what_the_cpu_keeps(folder: str) -> None:
    cells = cells_of(SPECS, (8, 33))
    lm = open_model(folder, "cuda:all", "float32").load()
    assert len({parameter.device for parameter in lm.model.parameters()}) > 1
    here = try_out(tiny_loaded("llama"), prompt_of(), cells)
    there = try_out(lm, prompt_of(), cells)
    for cell in cells:
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here.kept(cell), there.kept(cell), strict=True))
        assert here[cell].outcome.nll == pytest.approx(there[cell].outcome.nll, abs=1e-3)
