"""No buffer grows faster than the context, whatever the policy, the schedule and the kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kvbench.contract.cell import Cell
from kvbench.contract.registry import POLICIES
from kvbench.engine import attention
from kvbench.engine.evaluate import evaluate
from kvbench.engine.measure import Measurement
from kvbench.learn.record import record
from kvbench.learn.trace import utilities
from kvbench.model import memory
from kvbench.model.open import LoadedModel
from tests.laws.lab import KEY, SPECS, cells_of, loaded, prompt_of, sample_of, try_out
from tests.tiny import ARCHS, SLIDING_WINDOW

LENGTHS = (384, 768)
LINEAR = 2.2  # growth of the largest buffer when the context doubles; a square buffer grows by 4


class Largest(TorchDispatchMode):
    """The largest storage that any operation gives back, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [part.untyped_storage().nbytes() for part in tree_iter(result) if isinstance(part, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


def test_a_square_buffer_is_seen() -> None:
    sizes = []
    for n in LENGTHS:
        with Largest() as largest:
            torch.nn.functional.scaled_dot_product_attention(
                *(torch.ones(1, 2, n, 16) for _ in "qkv"), attn_mask=torch.ones(n, n, dtype=torch.bool).tril()
            )
        sizes.append(largest.bytes)
    assert sizes[1] / sizes[0] > 3.5


@pytest.mark.parametrize("schedule", ["prefill", "chunked"])
@pytest.mark.parametrize("arch", ["llama", "sliding"])
def test_a_sample(arch: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 64)  # of short prompts, the same shapes as of long ones
    monkeypatch.setattr("kvbench.contract.attention_sums.BLOCK", 64)
    lm = loaded(arch)
    sizes = []
    for n in LENGTHS:
        prompt = prompt_of(n)
        cells = cells_of(SPECS, (33,), schedule, 128)
        with Largest() as largest:
            done = evaluate(lm, sample_of(prompt), prompt, cells, KEY)
        assert all(isinstance(found, Measurement) for found in done.cells.values())
        sizes.append(largest.bytes)
    assert sizes[1] / sizes[0] < LINEAR, sizes


def test_a_trace_and_its_utilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.contract.attention_sums.BLOCK", 64)
    lm: LoadedModel = loaded("llama")
    policy = POLICIES.parse("knorm")
    sizes = []
    for n in LENGTHS:
        with Largest() as largest:
            layers, scaling, _ = record(lm, prompt_of(n), torch.float16, Cell(policy, 32), "t")
            q, k, _ = (part.float() for part in layers[0])
            utilities(q, k, scaling, [n // 2, n])
        sizes.append(largest.bytes)
    assert sizes[1] / sizes[0] < LINEAR, sizes


@pytest.mark.parametrize("block", [5, SLIDING_WINDOW, 50])
@pytest.mark.parametrize("schedule", ["prefill", "chunked"])
def test_windows_in_blocks_are_windows(block: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the block, the answers of a model with sliding windows stay."""
    assert "sliding" in ARCHS
    cells = cells_of(("knorm", "snapkv:window=8,kernel=3"), (8, 33), schedule)
    whole = try_out(loaded("sliding"), prompt_of(), cells)
    monkeypatch.setattr(attention, "BLOCK", block)
    blocked = try_out(loaded("sliding"), prompt_of(), cells)
    for cell in cells:
        assert all(torch.equal(a, b) for a, b in zip(whole.kept(cell), blocked.kept(cell), strict=True))
        assert whole[cell].outcome.nll == pytest.approx(blocked[cell].outcome.nll, abs=1e-5)


def test_the_peak_is_of_what_came_after_the_reset() -> None:
    if not memory.can_reset():
        pytest.skip("this system does not tell the peak of a part of a process")
    big = 200 * 2**20
    memory.release()  # else the tensor may lie in what earlier tests have freed, and nothing grows
    memory.reset_peak()
    held = torch.ones(big, dtype=torch.uint8)
    before = memory.peak_bytes()
    del held
    memory.release()
    memory.reset_peak()
    assert memory.peak_bytes() < before - big * 0.9
    held = torch.ones(big, dtype=torch.uint8)
    assert memory.peak_bytes() > before - big * 0.1
    del held


@pytest.mark.parametrize(("count", "words"), [(2**20, "1 MiB"), (3 * 2**29, "1.50 GiB")])
def test_bytes_in_words(count: int, words: str) -> None:
    assert memory.format_size(count) == words
