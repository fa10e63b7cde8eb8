"""The laws on random geometries, prompts, budgets, chunks, pins and policies: the same ones in every run."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.contract.cell import Cell, Ranker, Schedule
from kvbench.contract.pins import Pins
from kvbench.contract.registry import POLICIES
from kvbench.model.geometry import read_geometry
from kvbench.model.hook import install
from kvbench.model.open import LoadedModel
from tests.laws import lab
from tests.laws.lab import SPECS, Trial, prompt_of, same_positions, try_out
from tests.tiny import tiny_tokenizer

FEW = settings(derandomize=True, deadline=None, max_examples=25)


@dataclass(frozen=True)
class Shape:
    layers: int
    kv_heads: int
    group: int
    dim: int


SHAPES = st.builds(Shape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16]))
SEVERAL = st.lists(st.sampled_from(SPECS), min_size=2, max_size=4, unique=True)
BUDGETS = st.lists(st.integers(1, 60), min_size=2, max_size=5)
CHUNKS = st.none() | st.integers(1, 40)
PINS = st.none() | st.builds(Pins, st.integers(0, 5), st.integers(0, 5))


@functools.cache
def model(shape: Shape, attention: str) -> LoadedModel:
    """A random Llama of a shape, under our attention, stock sdpa or the laws' reference."""
    install()
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=shape.kv_heads * shape.group * shape.dim,
        intermediate_size=32,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.kv_heads * shape.group,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        initializer_range=0.2,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return LoadedModel(
        made.eval().requires_grad_(False), tiny_tokenizer(), "random", None, "0", torch.device("cpu"),
        torch.float32, read_geometry(config), frozenset({0}),
    )  # fmt: skip


def ranker(spec: str, pins: Pins | None) -> Ranker:
    policy = POLICIES.parse(spec)
    return Ranker(policy, policy.pins if pins is None else pins)


def trial(
    shape: Shape, n: int, spec: str, budgets: tuple[int, ...], pins: Pins | None, chunk: int | None
) -> Trial:
    """One policy at some budgets over a context of n tokens."""
    one = ranker(spec, pins)
    schedule = Schedule("prefill" if chunk is None else "chunked", chunk)
    cells = [Cell(one.policy, budget, one.pins, schedule) for budget in budgets]
    return try_out(model(shape, "kvbench"), prompt_of(n, question=3, reference=2), cells)


@FEW
@given(SHAPES, st.integers(1, 60), st.sampled_from(SPECS), st.integers(1, 70), PINS, CHUNKS)
def test_kept_is_the_budget_pins_stay_and_evicted_is_masked(
    shape: Shape, n: int, spec: str, budget: int, pins: Pins | None, chunk: int | None
) -> None:
    """Laws 2 and 3."""
    found = trial(shape, n, spec, (budget,), pins, chunk)
    (cell,) = found.cells
    assert found[cell].kept == min(budget, n)
    for heads in found.kept(cell):
        assert heads.shape == (shape.kv_heads, min(budget, n))
        assert (heads.diff(dim=-1) > 0).all()
        if budget > cell.pins.total:
            last = range(max(0, n - cell.pins.last), n)
            for positions in heads.tolist():
                assert {*range(min(cell.pins.first, n)), *last} <= set(positions)
    assert_masked(shape, found, cell)


def assert_masked(shape: Shape, found: Trial, cell: Cell) -> None:
    """What the cell predicts is what a plain model predicts that cannot see the evicted pairs."""
    prompt = found.prompt
    ids = torch.tensor([[*prompt.context, *prompt.question, *prompt.reference.ids]])
    history = found.history(cell)
    until = torch.full((shape.layers, shape.kv_heads, len(ids[0])), lab.FOREVER)
    for kept, end in zip(history, found.ends, strict=True):
        for layer, heads in enumerate(kept):
            for head, positions in enumerate(heads.tolist()):
                gone = sorted(set(range(end)) - set(positions))
                until[layer, head, gone] = until[layer, head, gone].clamp(max=end)
    transformers.AttentionInterface.register("laws_reference", lab._slow_attention)
    reference = model(shape, "laws_reference").model
    with torch.inference_mode():
        hidden = reference.model(input_ids=ids, use_cache=False, until=until[None]).last_hidden_state
        start = len(prompt.context) + len(prompt.question) - 1
        wanted = reference.lm_head(hidden[0, start:-1]).log_softmax(-1)
    nll = -wanted.gather(1, torch.tensor(prompt.reference.ids)[:, None]).mean().item()
    assert abs(found[cell].outcome.nll - nll) < 1e-4


@FEW
@given(SHAPES, st.integers(1, 60), st.sampled_from(SPECS), PINS, CHUNKS, st.integers(0, 9))
def test_with_room_for_everything_the_answer_is_the_full_caches(
    shape: Shape, n: int, spec: str, pins: Pins | None, chunk: int | None, more: int
) -> None:
    """Law 1."""
    found = trial(shape, n, spec, (n + more,), pins, chunk)
    (cell,) = found.cells
    full = found.done.full.outcome
    assert abs(found[cell].outcome.nll - full.nll) < 1e-4
    assert (found[cell].outcome.kl or 0.0) < 1e-4
    prompt = found.prompt
    ids = torch.tensor([[*prompt.context, *prompt.question, *prompt.reference.ids]])
    with torch.inference_mode():
        logits = model(shape, "sdpa").model(input_ids=ids, use_cache=False).logits[0]
    start = len(prompt.context) + len(prompt.question) - 1
    wanted = logits[start:-1].log_softmax(-1).gather(1, torch.tensor(prompt.reference.ids)[:, None])
    assert abs(full.nll + wanted.mean().item()) < 1e-4


@FEW
@given(SHAPES, st.integers(2, 60), st.sampled_from(SPECS), BUDGETS, PINS)
def test_kept_sets_nest(shape: Shape, n: int, spec: str, budgets: list[int], pins: Pins | None) -> None:
    """Law 4."""
    found = trial(shape, n, spec, tuple(sorted(set(budgets))), pins, None)
    cells = sorted(found.cells, key=lambda cell: cell.budget or 0)
    for small, large in itertools.pairwise(cells):
        for few, many in zip(found.kept(small), found.kept(large), strict=True):
            for one, other in zip(few.tolist(), many.tolist(), strict=True):
                assert set(one) <= set(other)


@FEW
@given(SHAPES, st.integers(1, 60), st.sampled_from(SPECS), st.integers(1, 60), PINS, st.integers(0, 20))
def test_one_chunk_is_after_prefill(
    shape: Shape, n: int, spec: str, budget: int, pins: Pins | None, more: int
) -> None:
    """Law 5."""
    whole, chunked = (trial(shape, n, spec, (budget,), pins, chunk) for chunk in (None, n + more))
    (one,), (other,) = whole.cells, chunked.cells
    assert same_positions(whole.kept(one), chunked.kept(other))
    assert abs(whole[one].outcome.nll - chunked[other].outcome.nll) < 1e-5


@FEW
@given(SHAPES, st.integers(2, 60), SEVERAL, st.integers(1, 60), st.none() | st.integers(5, 40))
def test_company_does_not_matter(
    shape: Shape, n: int, specs: list[str], budget: int, chunk: int | None
) -> None:
    """Law 6: a cell alone, or beside others in any order."""
    schedule = Schedule("prefill" if chunk is None else "chunked", chunk)
    cells = [Cell(one.policy, budget, one.pins, schedule) for one in (ranker(spec, None) for spec in specs)]
    lm, prompt = model(shape, "kvbench"), prompt_of(n, question=3, reference=2)
    together = try_out(lm, prompt, cells)
    for cell in reversed(cells):
        alone = try_out(lm, prompt, [cell])
        assert same_positions(alone.kept(cell), together.kept(cell))
        assert abs(alone[cell].outcome.nll - together[cell].outcome.nll) < 1e-5
