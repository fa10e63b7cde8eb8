"""The laws for policies that learn: KVP and JudgeQ with random weights of the tiny models' shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.judgeq import make as soft
from tests.kvp import make
from tests.laws.lab import (
    BUDGETS,
    N,
    cells_of,
    loaded,
    log_probs,
    masked_hidden,
    prompt_of,
    same_positions,
    try_out,
    visible_until,
)
from tests.laws.test_chunks import assert_same, evicted_is_poison
from tests.laws.test_full_budget import assert_plain
from tests.laws.test_order import assert_agree
from tests.tiny import DISTINCT, HEAD_DIM, KV_HEADS

CLOSE = 1e-4


@pytest.fixture(params=DISTINCT)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["kvp", "judgeq"])
def spec(arch: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    from kvbench.policies.kvp.scorer import ScorerShape

    layers = len(loaded(arch).geometry.full_layers)
    if request.param == "judgeq":
        path = tmp_path / "random.safetensors"
        return f"judgeq:weights={soft.tokens_file(path, soft.drawn(), '5e', layers)}"
    shape = ScorerShape(layers, KV_HEADS, HEAD_DIM, hidden=8)
    return f"kvp:weights={make.weights_file(tmp_path / 'random.safetensors', shape, '5e')}"


@pytest.mark.parametrize("schedule", ["prefill", "chunked"])
def test_full_budget(arch: str, spec: str, schedule: str) -> None:
    done = try_out(loaded(arch), prompt_of(choices=True), cells_of((spec,), (N, 10 * N), schedule))
    with torch.inference_mode():
        assert_plain(arch, done)


@pytest.mark.parametrize("schedule", ["prefill", "chunked"])
def test_evicted_is_masked_and_exact(arch: str, spec: str, schedule: str) -> None:
    done = try_out(loaded(arch), prompt_of(), cells_of((spec,), BUDGETS, schedule))
    prompt = done.prompt
    row = torch.tensor([[*prompt.context, *prompt.question, *prompt.reference.ids[:-1]]])
    for cell in done.cells:
        assert done[cell].kept == cell.budget
        hidden = masked_hidden(arch, row, visible_until(done.history(cell), done.ends, N)[None])
        logprobs = log_probs(arch, hidden[0, N + len(prompt.question) - 1 :])
        nll = -logprobs.gather(1, torch.tensor(prompt.reference.ids)[:, None]).mean()
        assert done[cell].outcome.nll == pytest.approx(float(nll), abs=CLOSE)
    small, large = (done.kept(cell) for cell in done.cells)
    for layer in done.lm.geometry.full_layers if schedule == "prefill" else ():
        for fewer, more in zip(small[layer].tolist(), large[layer].tolist(), strict=True):
            assert set(fewer) <= set(more)


def test_chunks_order_and_poison(arch: str, spec: str) -> None:
    cells, many = cells_of((spec,), BUDGETS), cells_of((spec, "knorm"), BUDGETS)
    once = try_out(loaded(arch), prompt_of(), cells)
    assert_same(once, try_out(loaded(arch), prompt_of(), cells_of((spec,), BUDGETS, "chunked", N)))
    with evicted_is_poison():
        assert_same(once, try_out(loaded(arch), prompt_of(), cells))
    together = try_out(loaded(arch), prompt_of(), many[::-1])
    for cell in cells:
        assert_agree(once, together, cell)
    again = try_out(loaded(arch), prompt_of(), cells)
    assert all(same_positions(once.kept(cell), again.kept(cell)) for cell in cells)
