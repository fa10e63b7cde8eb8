"""Law 1: with room for everything, kvbench computes what the plain model computes (fp32, 1e-4)."""

from __future__ import annotations

import pytest
import torch

from tests.laws.lab import (
    CHUNK,
    SCHEDULES,
    SPECS,
    N,
    Trial,
    cells_of,
    loaded,
    plain,
    prompt_of,
    sample_of,
    try_out,
)  # fmt: skip
from tests.tiny import ARCHS, SLIDING_WINDOW, tiny_loaded, tiny_model

CLOSE = 1e-4


def greedy(arch: str, ids: list[int], new: int) -> list[int]:
    """What the plain model writes after ids, reading everything again for every token."""
    written: list[int] = []
    for _ in range(new):
        written.append(int(plain(arch)(torch.tensor([[*ids, *written]])).logits[0, -1].argmax()))
    return written


def assert_plain(arch: str, done: Trial) -> None:
    """Every logit of every forward is the plain model's at that place."""
    prompt = done.prompt
    start = [*prompt.context, *prompt.question]
    written = [] if prompt.choices else greedy(arch, start, done.sample.max_new_tokens)
    found = {}
    for more in (prompt.reference.ids, written, *(choice.ids for choice in prompt.choices)):
        ids = torch.tensor([*start, *more])
        found[tuple(ids.tolist())] = plain(arch)(ids[None]).logits[0]
    for seen, run in done.runs():
        span = slice(int(seen.positions[0, run[0]]), int(seen.positions[0, run[-1]]) + 1)
        assert (seen.positions[:, run] == torch.arange(span.start, span.stop)).all()
        for row, hidden in zip(seen.ids[:, run].tolist(), seen.hidden[:, run], strict=True):
            logits = plain(arch).lm_head(hidden)
            apart = [
                float((logits - wanted[span]).abs().max())
                for ids, wanted in found.items()
                if list(ids[span]) == row
            ]
            assert apart, "the model read ids that belong to no prompt"
            assert min(apart) < CLOSE


@pytest.mark.parametrize("choices", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_logit(arch: str, schedule: str, choices: bool) -> None:
    prompt = prompt_of(choices=choices, seed=1)
    done = try_out(loaded(arch), prompt, cells_of(SPECS, (N, N + 1, 10 * N), schedule))
    with torch.inference_mode():
        assert_plain(arch, done)
    for cell in done.cells:
        found = done[cell]
        assert found.kept == N
        assert found.outcome.answer.label == done.done.full.outcome.answer.label
        assert found.outcome.nll == pytest.approx(done.done.full.outcome.nll, abs=CLOSE)
        assert found.outcome.kl == pytest.approx(0.0, abs=CLOSE)
        assert found.missed_mass == pytest.approx(0.0, abs=1e-6)
        assert found.outcome.answer.text == done.done.full.outcome.answer.text


@pytest.mark.parametrize("arch", ARCHS)
def test_chunk_remainders(arch: str) -> None:
    """B09: lengths around multiples of the chunk; every one reads as in one go."""
    for n in (63, 64, 65, 127, 128, 129, 1):
        prompt = prompt_of(n, seed=n)
        done = try_out(loaded(arch), prompt, cells_of(("snapkv", "random"), (n, n + 40), "chunked", 64))
        read = [seen.ids.shape[1] for seen in done.forwards]
        assert len(done.rounds) == -(-n // 64)
        assert n == 1 or n % 64 == 0 or n % 64 in read  # the remainder was a chunk of its own
        with torch.inference_mode():
            assert_plain(arch, done)


@pytest.mark.parametrize("spec", SPECS)
def test_each_policy_alone(spec: str) -> None:
    """No policy owes its exactness to a row that it shares with another one."""
    for schedule in SCHEDULES:
        done = try_out(loaded("llama"), prompt_of(seed=3), cells_of((spec,), (N,), schedule))
        with torch.inference_mode():
            assert_plain("llama", done)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scale_of_its_own(schedule: str) -> None:
    """Models may scale logits by something else than one over the root of the head size."""
    lm, stock = tiny_loaded("llama"), tiny_model("llama", "sdpa")
    prompt = prompt_of(choices=True)
    ids = torch.tensor([[*prompt.context, *prompt.question, *prompt.reference.ids]])
    usual = stock(ids).logits
    for model in (lm.model, stock):
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.1
    wanted = stock(ids).logits
    assert (usual - wanted).abs().max() > 0.1
    done = try_out(lm, prompt, cells_of(("knorm", "tova"), (N,), schedule))
    compared = 0
    with torch.inference_mode():
        for seen, run in done.runs():
            span = slice(int(seen.positions[0, run[0]]), int(seen.positions[0, run[-1]]) + 1)
            if seen.ids[0, run].tolist() == ids[0, span].tolist():
                apart = stock.lm_head(seen.hidden[:, run]) - wanted[:, span]
                assert apart.abs().max() < CLOSE
                compared += 1
    assert compared > 1  # the context, and question and reference behind it
    for cell in done.cells:
        assert done[cell].outcome.kl == pytest.approx(0, abs=CLOSE)


def test_sliding_layers_keep_everything() -> None:
    """B13: only full layers are evicted, and the context is longer than the window."""
    assert N > SLIDING_WINDOW
    for schedule in SCHEDULES:
        done = try_out(loaded("sliding"), prompt_of(), cells_of(SPECS, (8,), schedule))
        full = done.lm.geometry.full_layers
        assert full == (0, 2)
        for cell in done.cells:
            for layer, positions in enumerate(done.kept(cell)):
                assert positions.shape[1] == (8 if layer in full else N)
                if layer not in full:
                    assert (positions == torch.arange(N)).all()
            assert done[cell].kept == 8
            assert torch.isfinite(torch.tensor([done[cell].outcome.nll, done[cell].outcome.kl or 0.0])).all()
    assert all(seen.hidden.isfinite().all() for seen in done.forwards)
    assert CHUNK > SLIDING_WINDOW  # inside a chunk, too, some tokens are out of each other's sight


@pytest.mark.parametrize("arch", ["llama", "sliding"])
def test_long_answers(arch: str) -> None:
    """B14: 120 tokens written after 10 of context, none of them lost."""
    prompt = prompt_of(10, seed=7)
    done = try_out(loaded(arch), prompt, cells_of(("random",), (10,)), sample_of(prompt, new=120))
    written = greedy(arch, [*prompt.context, *prompt.question], 120)
    ends = [i for i, token in enumerate(written) if token in done.lm.eos_ids]
    written = written[: ends[0]] if ends else written
    text = done.lm.tokenizer.decode(written, skip_special_tokens=True)
    assert done.done.full.outcome.answer.text == text
    assert all(done[cell].outcome.answer.text == text for cell in done.cells)
