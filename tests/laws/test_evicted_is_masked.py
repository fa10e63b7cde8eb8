"""Law 2: an evicted pair is a masked pair, in every layer and KV head, for every answer.

Chunk outputs too: a chunk attends to what was kept and to all of itself, and only then is anything
evicted.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.laws.lab import (
    BUDGETS,
    CHUNK,
    SCHEDULES,
    SPECS,
    Trial,
    log_probs,
    masked_hidden,
    plain,
    trial,
    visible_until,
)  # fmt: skip
from tests.tiny import ARCHS

CLOSE = 1e-4


@functools.cache
def gone(arch: str, schedule: str, choices: bool) -> Tensor:
    """(cell, layer, kv_head, position) of the reference, from the kept sets alone."""
    done = trial(arch, schedule, choices)
    rows = [visible_until(done.history(cell), done.ends, len(done.prompt.context)) for cell in done.cells]
    return torch.stack(rows)


def continued(done: Trial, arch: str, schedule: str, choices: bool, ids: tuple[int, ...]) -> Tensor:
    """Reference log-probabilities (cell, token of the continuation, vocabulary)."""
    prompt = done.prompt
    row = torch.tensor([*prompt.context, *prompt.question, *ids[:-1]])
    hidden = masked_hidden(arch, row.expand(len(done.cells), -1), gone(arch, schedule, choices))
    return log_probs(arch, hidden[:, len(prompt.context) + len(prompt.question) - 1 :])


def likelihoods(logprobs: Tensor, ids: tuple[int, ...]) -> Tensor:
    return logprobs.gather(2, torch.tensor(ids).expand(logprobs.shape[0], -1)[..., None])[..., 0]


def close(values: list[float], wanted: Tensor, done: Trial) -> None:
    """Compare one number per cell and name the cells that differ."""
    differs = (torch.tensor(values) - wanted).abs()
    wrong = {f"{cell.spec} at {cell.budget}": float(d) for cell, d in zip(done.cells, differs, strict=True)}
    assert {name: d for name, d in wrong.items() if d > CLOSE} == {}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", ARCHS)
def test_reference_continuation(arch: str, schedule: str) -> None:
    done = trial(arch, schedule)
    reference = done.prompt.reference.ids
    logprobs = continued(done, arch, schedule, False, reference)
    nll = -likelihoods(logprobs, reference).mean(1)
    close([done[cell].outcome.nll for cell in done.cells], nll, done)
    assert nll.unique().numel() > len(SPECS)  # or the comparison would say nothing
    whole = torch.tensor([[*done.prompt.context, *done.prompt.question, *reference[:-1]]])
    full = plain(arch)(whole).logits.log_softmax(-1)[:, -len(reference) :]
    kl = (full.exp() * (full - logprobs)).sum(-1).mean(1)
    close([done[cell].outcome.kl or 0.0 for cell in done.cells], kl, done)
    assert kl.max() > 100 * CLOSE


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", ARCHS)
def test_choices(arch: str, schedule: str) -> None:
    done = trial(arch, schedule, choices=True)
    for index, choice in enumerate(done.prompt.choices):
        logprobs = continued(done, arch, schedule, True, choice.ids)
        wanted = likelihoods(logprobs, choice.ids)[:, -choice.scored :].sum(1)
        close([done[cell].outcome.answer.loglikelihoods[index] for cell in done.cells], wanted, done)
        greedy = (logprobs.argmax(-1) == torch.tensor(choice.ids))[:, -choice.scored :].all(1)
        assert [done[cell].outcome.answer.greedy[index] for cell in done.cells] == greedy.tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", ARCHS)
def test_generated_text(arch: str, schedule: str) -> None:
    done = trial(arch, schedule)
    start = torch.tensor([*done.prompt.context, *done.prompt.question])
    ids = start.expand(len(done.cells), -1)
    for _ in range(done.sample.max_new_tokens):
        hidden = masked_hidden(arch, ids, gone(arch, schedule, False))
        ids = torch.cat((ids, log_probs(arch, hidden[:, -1:]).argmax(-1)), 1)
    for cell, row in zip(done.cells, ids[:, len(start) :].tolist(), strict=True):
        while set(row) & done.lm.eos_ids:
            row.pop()
        text = done.lm.tokenizer.decode(row, skip_special_tokens=True)
        assert done[cell].outcome.answer.text == text, cell
    assert len({tuple(row) for row in ids.tolist()}) > 1


@pytest.mark.parametrize("arch", ARCHS)
def test_chunk_outputs(arch: str) -> None:
    """B08: every output of every chunk, against a reference that evicts only after the chunk was read."""
    done = trial(arch, "chunked")
    context = torch.tensor(done.prompt.context)
    wanted = masked_hidden(arch, context.expand(len(done.cells), -1), gone(arch, "chunked", False))
    chunks = [seen for seen in done.forwards if seen.positions.shape[1] == CHUNK][1:]
    assert [int(seen.positions[0, 0]) for seen in chunks] == [CHUNK]  # the first one has nothing kept
    last = next(seen for seen in done.forwards if seen.positions[0, 0] == 2 * CHUNK)
    for seen in (*chunks, last):
        span = slice(int(seen.positions[0, 0]), int(seen.positions[0, -1]) + 1)
        # Rows that kept the same pairs were read once: each reference row must be one of those read.
        apart = (wanted[:, None, span] - seen.hidden[None]).abs().amax((2, 3))
        assert apart.amin(1).max() < CLOSE
        assert apart.amin(0).max() < CLOSE
    assert max(BUDGETS) < 2 * CHUNK  # something had been evicted before the last chunk
