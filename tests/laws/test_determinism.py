"""Law 9: the same command gives the same rows; ties go to the newer token; draws are independent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import scipy.stats
import torch
from torch import Tensor

from kvbench.contract.cell import Cell
from kvbench.contract.draws import draw_key, uniform_at
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.engine.order import keep, rank
from tests.laws.lab import (
    CHUNK,
    SCHEDULES,
    SPECS,
    N,
    cells_of,
    loaded,
    prompt_of,
    ranker_of,
    same_positions,
    schedule_of,
    trial,
    try_out,
)  # fmt: skip
from tests.laws.runs import by_key, config, lines, recorded
from tests.scene import DIM, KV_HEADS, ranked, scene
from tests.tiny import DISTINCT, LAYERS


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("schedule", [{}, {"schedule": "chunked", "chunk": 16}])
def test_the_same_command_twice(folder: str, tmp_path: Path, schedule: dict[str, object]) -> None:
    """Bit for bit, except times; a command in another order gives the same rows in another order."""
    names = [spec for spec in SPECS if ":" not in spec]
    schedule = schedule | {"limit": 2}
    first, second = (config(folder, tmp_path / name, policies=names, **schedule) for name in "ab")
    recorded(first)
    recorded(second)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    backwards = config(
        folder, tmp_path / "c", policies=names[::-1], budgets=(20, 8),
        tasks=("laws_toy:kind=generate", "laws_toy:ids=3210", "laws_toy"), **schedule,
    )  # fmt: skip
    recorded(backwards)
    there, here = by_key(lines(tmp_path / "a")), by_key(lines(tmp_path / "c"))
    assert there.keys() <= here.keys()
    for key, row in there.items():
        assert here[key].pop("metrics") == pytest.approx(row.pop("metrics"), abs=1e-5)
        assert here[key] == row


@pytest.mark.usefixtures("toys")
def test_the_seed_and_the_sample_draw(folder: str, tmp_path: Path) -> None:
    """Another seed draws again, for `random` alone; two samples of one text do not share draws."""
    found = {}
    for seed in (0, 1):
        settings = config(
            folder, tmp_path, policies=("random", "knorm"), tasks="laws_toy:twins=true", seed=seed
        )
        rows = recorded(settings)[0].rows
        for policy in ("random", "knorm"):
            kl = rows[(rows["policy"] == policy) & (rows["budget"] == 8)].sort_values("sample")["metric:kl"]
            found[policy, seed] = kl.tolist()
    assert found["knorm", 0] == found["knorm", 1]
    assert len(set(found["knorm", 0])) == 1  # the texts are the same
    assert len({*found["random", 0], *found["random", 1]}) == 8


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", DISTINCT)
def test_the_same_evaluation_twice(arch: str, schedule: str) -> None:
    first = trial(arch, schedule)
    second = try_out(first.lm, first.prompt, first.cells)
    for cell in first.cells:
        assert same_positions(first.kept(cell), second.kept(cell))
        assert first[cell].outcome == second[cell].outcome
        assert first[cell].missed_mass == second[cell].missed_mass
        assert first[cell].eviction_cost == second[cell].eviction_cost


def with_tied_norms(slots: int) -> Observation:
    """bf16 keys with three different norms only: one non-zero entry of 1, 2 or 4 each."""
    seen = scene(slots, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    place = torch.randint(DIM, (1, KV_HEADS, slots, 1), generator=draw)
    size = 2.0 ** torch.randint(3, (1, KV_HEADS, slots, 1), generator=draw)
    seen.keys = torch.zeros(1, KV_HEADS, slots, DIM).scatter_(3, place, size).bfloat16()
    return seen


@pytest.mark.parametrize("pins", [Pins(), Pins(4, 16)])
def test_ties_go_to_the_newer_token(pins: Pins) -> None:
    """B27: every time, at neighbouring budgets, nested."""
    seen = with_tied_norms(200)
    ranker = ranker_of("knorm", pins)
    found = set()
    for _ in range(5):
        score = ranker.policy.score(seen)
        assert score.unique().numel() == 3
        order = rank(score, seen.positions, pins, seen.seen)
        wanted = ranked(score, seen, pins)
        for budget in (20, 21, 100):
            kept = keep(order, budget)
            assert kept[0].tolist() == [sorted(head[:budget]) for head in wanted]
        small, large = (keep(order, budget)[0].tolist() for budget in (20, 21))
        assert all(set(a) < set(b) for a, b in zip(small, large, strict=True))
        found.add(str(small))
    assert len(found) == 1


@dataclass(frozen=True)
class Indifferent(Policy):
    """All tokens are worth the same."""

    def score(self, seen: Observation) -> Tensor:
        return torch.zeros(seen.positions.shape)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_indifference_keeps_the_newest(schedule: str) -> None:
    cells = [Cell(Indifferent(), budget, Pins(), schedule_of(schedule)) for budget in (1, 20, 21)]
    done = try_out(loaded("llama"), prompt_of(), cells)
    for cell in cells:
        newest = list(range(N - (cell.budget or 0), N))
        assert all(layer.tolist() == [newest, newest] for layer in done.kept(cell))


def draws(*parts: object, tokens: int = 5000) -> Tensor:
    """(kv_head, token)"""
    return uniform_at(draw_key(*parts), torch.arange(tokens).expand(1, KV_HEADS, -1))[0]


def test_draws_are_uniform() -> None:
    """Chi-square on a fixed seed: 64 bins of 80,000 draws over layers and KV heads, and pairs of them."""
    every = torch.stack([draws(7, "sample", layer) for layer in range(8)])
    assert every.min() >= 0
    assert every.max() < 1
    counts = torch.histc(every.flatten(), 64, 0, 1)
    assert 0.001 < scipy.stats.chisquare(counts.tolist()).pvalue < 0.999
    for a, b in ((every[0, 0], every[0, 1]), (every[0, 0], every[1, 0]), (every[0, 0, 1:], every[0, 0, :-1])):
        pairs = (a * 8).long() * 8 + (b * 8).long()
        counts = torch.bincount(pairs, minlength=64)
        assert 0.001 < scipy.stats.chisquare(counts.tolist()).pvalue < 0.999


def test_draws_differ() -> None:
    """Between layers, KV heads, samples, tasks and seeds."""
    keys = [(0, "t", "a", 0), (0, "t", "a", 1), (0, "t", "b", 0), (0, "u", "a", 0), (1, "t", "a", 0)]
    streams = torch.cat([draws(*key) for key in keys])
    assert len({tuple(stream[:8].tolist()) for stream in streams}) == KV_HEADS * len(keys)
    correlation = torch.corrcoef(streams) - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / 5000**0.5


def test_kept_at_random() -> None:
    """Different sets in every layer and KV head, and for another sample key; all positions alike."""
    done = try_out(loaded("llama"), prompt_of(), cells_of(("random",), (20,)))
    (cell,) = done.cells
    sets = {tuple(head) for layer in done.kept(cell) for head in layer.tolist()}
    assert len(sets) == LAYERS * KV_HEADS
    counts = torch.zeros(N)
    for index in range(400):
        score = uniform_at(draw_key(index, 0), torch.arange(N).expand(1, KV_HEADS, -1))
        order = rank(score, torch.arange(N).expand(1, KV_HEADS, -1), Pins(), N)
        counts += torch.bincount(keep(order, 20).flatten(), minlength=N)
    assert 0.001 < scipy.stats.chisquare(counts.tolist()).pvalue < 0.9999


def test_a_token_keeps_its_draw() -> None:
    """Whatever was evicted, in whatever chunk: a draw depends on layer, KV head and position."""
    positions = torch.arange(N).expand(1, KV_HEADS, -1)
    whole = uniform_at(3, positions)
    some = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(i))[:20] for i in (0, 1)])
    some = some.sort(-1).values[None]
    assert torch.equal(uniform_at(3, some), whole.gather(2, some))
    kept = {}
    for chunk in (7, CHUNK, N):
        done = try_out(loaded("llama"), prompt_of(), cells_of(("random",), (8, 20), "chunked", chunk))
        for cell in done.cells:
            kept.setdefault(cell.budget, []).append(done.kept(cell))
    for sets in kept.values():
        assert same_positions(sets[0], sets[1])
        assert same_positions(sets[0], sets[2])
