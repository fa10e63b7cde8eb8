"""Training: what it learns, and that the same lesson gives the same weights in every way to get there."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.contract.eviction import eviction_cost
from kvbench.contract.pins import Pins
from kvbench.errors import BadInput, UnknownName, WorkersLost
from kvbench.learn.trace import TraceInfo, TraceSet, utilities
from kvbench.learn.training import LEAST, held_out, learning_rate
from kvbench.policies.kvp import command
from kvbench.policies.kvp.checkpoint import read_weights
from kvbench.policies.kvp.course import Curriculum, TrainingSet
from kvbench.policies.kvp.objectives import OBJECTIVES, BudgetWeighting, Step, objective
from kvbench.policies.kvp.recipe import RECIPES, KVPRecipe
from kvbench.policies.kvp.scorer import ScorerWeights, scores
from kvbench.policies.kvp.train import clip_each_agent, standardise, train, validation_cost
from kvbench.study.executors import Hold, Local, LostJob, Work
from tests.kvp import make
from tests.kvp.make import KV_HEADS, LAYERS, QUICK

AGENTS = LAYERS * KV_HEADS
LONG = replace(QUICK, steps=150, objective="softcost")


@pytest.fixture(scope="module")
def lesson(synthetic: TraceSet) -> TrainingSet:
    return TrainingSet.prepare(LONG, synthetic)


@pytest.fixture(scope="module")
def trained(lesson: TrainingSet) -> ScorerWeights:
    """150 steps without interruption."""
    return train(LONG, lesson)[0]


def assert_same(one: ScorerWeights, other: ScorerWeights) -> None:
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


def test_recipe_of_the_paper() -> None:
    paper = RECIPES["paper"]
    values = (paper.steps, paper.lr, paper.warmup, paper.last_lr, paper.clip, paper.hidden)
    assert values == (4000, 5e-5, 100, 1e-6, 5.0, 256)
    assert (paper.objective, paper.split, paper.budgets, paper.pins) == ("rl", "uniform", "uniform", "4,16")


def test_learning_rate() -> None:
    paper = RECIPES["paper"]
    rates = [learning_rate(paper, step) for step in range(paper.steps + 1)]
    assert rates[0] == pytest.approx(0.01 * 5e-5)
    assert rates[50] == pytest.approx(5e-5 * 0.505)
    assert rates[100] == pytest.approx(5e-5)
    assert rates[2050] == pytest.approx((5e-5 + 1e-6) / 2)
    assert rates[4000] == pytest.approx(1e-6)
    assert max(rates) == rates[100]
    assert rates[:101] == sorted(rates[:101])
    assert rates[100:] == sorted(rates[100:], reverse=True)


def test_each_agent_is_clipped_by_its_own_norm() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.zeros(3, *shape, requires_grad=True) for shape in ((4, 5), (1, 5), (5, 1))]
    sizes = torch.tensor([100.0, 0.01, 5.0])
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=draw) * sizes.view(-1, 1, 1)
    before = [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]

    def norm(agent: int, grads: list[torch.Tensor]) -> float:
        return math.sqrt(sum(grad[agent].square().sum().item() for grad in grads))

    clip_each_agent(tensors, 5.0)
    after = [tensor.grad for tensor in tensors if tensor.grad is not None]
    for agent in range(3):
        wanted = min(5.0, norm(agent, before))
        assert norm(agent, after) == pytest.approx(wanted, rel=1e-5)
        for old, new in zip(before, after, strict=True):  # same direction
            assert torch.allclose(new[agent], old[agent] * wanted / norm(agent, before), rtol=1e-4)
    assert norm(0, before) > 5 > norm(1, before)


def test_inputs_are_standardised_per_agent(lesson: TrainingSet) -> None:
    shape = (AGENTS, 2 * make.DIM)
    weights = ScorerWeights(torch.zeros(shape), torch.ones(shape), *[torch.zeros(1)] * 4)
    examples = [lesson.course.example(step, Pins()) for step in range(40)]
    examples[0].keys = examples[0].keys.clone()
    for example in examples:
        example.values = example.values.clone()
        example.values[:, :, 3] = 7  # always the same: carries nothing
    standardise(weights, iter(examples), "none")
    seen = torch.cat([example.inputs("none") for example in examples], 1)
    standard = (seen - weights.mean[:, None]) * weights.scale[:, None]
    assert standard.mean(1).abs().max() < 1e-4
    changing = [i for i in range(2 * make.DIM) if i != make.DIM + 3]
    assert torch.allclose(standard.std(1)[:, changing], torch.tensor(1.0), atol=1e-2)
    assert standard[:, :, make.DIM + 3].eq(0).all()


@pytest.mark.parametrize(
    ("split", "share"), [("uniform", (0, 0.1)), ("boundary", (1, 1)), ("mix", (0.4, 0.6))]
)
def test_visits(synthetic: TraceSet, split: Any, share: tuple[float, float]) -> None:
    """Every trace as often as the others; the future begins where the split rule says."""
    course = Curriculum.draw(synthetic, [0, 2, 3], 302, split, seed=1)
    counts = Counter(trace for trace, _ in course.visits)
    assert set(counts) == {0, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= 1
    at_boundary = sum(n == make.CONTEXT for _, n in course.visits) / 302
    assert share[0] <= at_boundary <= share[1]
    assert all(LEAST <= n < make.TOKENS for _, n in course.visits)
    if split != "boundary":
        assert {n for _, n in course.visits} == set(range(LEAST, make.TOKENS - 1)) | {make.CONTEXT}
    assert course.visits == Curriculum.draw(synthetic, [0, 2, 3], 302, split, seed=1).visits
    assert split == "boundary" or course.visits != Curriculum.draw(synthetic, [0, 2, 3], 302, split, 2).visits


def test_an_example_holds_what_competes(synthetic: TraceSet) -> None:
    course = Curriculum.draw(synthetic, [1], 3, "boundary", seed=0)
    course.prepare(range(LAYERS))
    layers = [synthetic[1].layer(layer) for layer in range(LAYERS)]
    u = torch.cat([utilities(q, k, make.DIM**-0.5, [make.CONTEXT])[0] for q, k, _ in layers])
    example = course.example(0, Pins(4, 16))
    assert example.positions.tolist() == list(range(4, 24))
    assert torch.equal(example.utility, u[:, 4:24])
    assert torch.equal(example.keys, torch.cat([k for _, k, _ in layers])[:, 4:24])
    assert torch.equal(example.values, torch.cat([v for *_, v in layers])[:, 4:24])
    everything = course.example(0, Pins(20, 20))  # pins that leave nothing to rank are not applied
    assert everything.positions.tolist() == list(range(make.CONTEXT))
    inputs = example.inputs("raw")
    assert inputs.shape == (AGENTS, 20, 2 * make.DIM + 1)
    assert inputs.dtype == torch.float32
    assert inputs[:, :, -1].eq(torch.arange(4, 24)).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_learns(lesson: TrainingSet, name: str) -> None:
    """u is a function of the key here: its own loss falls, and the ranking gets nearly as good as can be."""
    config = replace(LONG, objective=name)
    start = train(replace(config, steps=1, lr=1e-9), lesson)[0]
    weights, cost = train(config, lesson)
    unlearned = validation_cost(start, lesson.exam, config)
    assert unlearned > 1.5
    assert cost < 1 + 0.25 * (unlearned - 1)
    if name == "rl":  # its loss is only a vehicle for the gradient
        return

    def loss(weights: ScorerWeights) -> float:
        example = lesson.exam.example(0, Pins())
        step = Step(example.utility, BudgetWeighting(), 4, torch.Generator().manual_seed(0))
        return objective(name)(scores(weights, example.inputs("none")), step).sum().item()

    assert loss(weights) < loss(start)


def test_validation_cost_is_the_cost_of_the_ranking(lesson: TrainingSet, trained: ScorerWeights) -> None:
    costs = []
    for step in range(len(lesson.exam.visits)):
        example = lesson.exam.example(step, Pins())
        order = scores(trained, example.inputs("none")).argsort(-1, descending=True)
        costs.append(eviction_cost(order, example.utility).mean().item())
    assert validation_cost(trained, lesson.exam, LONG) == pytest.approx(sum(costs) / len(costs), rel=1e-5)


def test_validation_survives_a_future_without_attention(lesson: TrainingSet, trained: ScorerWeights) -> None:
    """Utilities that underflow to 0 leave nothing to lose: cost 1, and no NaN in the card."""
    exam = replace(lesson.exam, utility={visit: u * 0 for visit, u in lesson.exam.utility.items()})
    assert validation_cost(trained, exam, LONG) == 1


def test_held_out_traces_only_measure(synthetic: TraceSet) -> None:
    lesson = TrainingSet.prepare(replace(LONG, validation=0.34), synthetic)
    assert {trace for trace, _ in lesson.course.visits} == {0, 1, 2, 3}
    assert {trace for trace, _ in lesson.exam.visits} == {4, 5}


def test_a_sample_that_measures_is_learned_from_at_no_length() -> None:
    names = ["niah:length=350|7-0|a", "niah:length=350|7-1|b", "vt|7-1|c", "niah:length=700|7-1|d"]
    infos = [TraceInfo(name, 9, 5, name.partition(":")[0].partition("|")[0], 1.0) for name in names]
    traces: Any = SimpleNamespace(infos=infos)
    assert held_out(traces, 0.25) == ([0, 2], [3])
    with pytest.raises(BadInput, match="1 different samples"):
        held_out(SimpleNamespace(infos=infos[1::2]), 0.25)  # type: ignore[arg-type]


def test_two_traces_are_the_least(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="2 or more"):
        TrainingSet.prepare(QUICK, make.synthetic(tmp_path, count=1))


@pytest.mark.parametrize("name", ["rl", "softcost", "ranknet"])
def test_a_seed_decides_everything(synthetic: TraceSet, name: str) -> None:
    config = replace(QUICK, objective=name)
    one, other = (train(config, TrainingSet.prepare(config, synthetic))[0] for _ in range(2))
    assert_same(one, other)
    config = replace(config, seed=1)
    assert not torch.equal(train(config, TrainingSet.prepare(config, synthetic))[0].w1, one.w1)


def test_every_step_draws_anew(lesson: TrainingSet, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def spy(found: torch.Tensor, step: Step) -> torch.Tensor:
        seeds.append(step.generator.initial_seed())
        return OBJECTIVES["softcost"](found, step)

    monkeypatch.setitem(OBJECTIVES, "rl", spy)
    for seed in (0, 1):
        train(replace(QUICK, objective="rl", seed=seed), lesson)
    assert len(set(seeds)) == 2 * QUICK.steps


class Killed(Exception):
    pass


@pytest.mark.parametrize("objective_name", ["softcost", "rl"])
@pytest.mark.parametrize("died", [100, 130])
def test_an_interrupted_training_goes_on(
    lesson: TrainingSet, tmp_path: Path, died: int, objective_name: str
) -> None:
    config, state = replace(LONG, objective=objective_name), tmp_path / "w.state"

    def kill(step: int, reward: float, cost: float | None) -> None:
        if step > died:
            raise Killed

    with pytest.raises(Killed):
        train(config, lesson, state, kill)
    steps: list[int] = []
    resumed, cost = train(config, lesson, state, lambda step, reward, cost: steps.append(step))
    assert steps == list(range(101, 151))
    whole, whole_cost = train(config, lesson)
    assert_same(resumed, whole)
    assert cost == whole_cost
    finished, cost = train(config, lesson, state)  # nothing is left to do
    assert_same(finished, whole)
    assert cost == whole_cost


def interrupted(lesson: TrainingSet, state: Path) -> None:
    train(replace(QUICK, steps=3), lesson, state)


def test_a_state_belongs_to_its_recipe_and_traces(lesson: TrainingSet, tmp_path: Path) -> None:
    state = tmp_path / "w.state"
    interrupted(lesson, state)
    with pytest.raises(BadInput, match=r"w\.state.*another recipe"):
        train(replace(QUICK, steps=4), lesson, state)
    others = make.synthetic(tmp_path / "others", seed=50)
    with pytest.raises(BadInput, match="traces"):
        train(replace(QUICK, steps=3), TrainingSet.prepare(replace(QUICK, steps=3), others), state)


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "folder"])
def test_a_broken_state_says_so(lesson: TrainingSet, tmp_path: Path, damage: str) -> None:
    state = tmp_path / "w.state"
    interrupted(lesson, state)
    data = state.read_bytes()
    state.unlink()
    if damage == "folder":
        state.mkdir()
    else:
        state.write_bytes({"empty": b"", "text": b"not a state", "cut": data[: len(data) // 2]}[damage])
    with pytest.raises(BadInput, match=r"w\.state.*delete it"):
        train(replace(QUICK, steps=3), lesson, state)


@pytest.mark.parametrize("name", ["softcost", "rl"])
def test_agents_are_independent(synthetic: TraceSet, tmp_path: Path, name: str) -> None:
    """Other contents of one KV head of one layer change its agent and no other."""
    config = replace(QUICK, objective=name)
    changed = make.synthetic(tmp_path, change=(1, 0))
    one, other = (train(config, TrainingSet.prepare(config, traces))[0] for traces in (synthetic, changed))
    for field in ("mean", "scale", "w1", "b1", "w2"):
        left, right = one.tensors()[field], other.tensors()[field]
        for agent in range(AGENTS):
            assert torch.equal(left[agent], right[agent]) == (agent != 1 * KV_HEADS + 0), (field, agent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "end"}, "uniform, boundary or mix"),
        ({"budgets": "square"}, "truncated:B"),
        ({"pins": "native"}, "FIRST,LAST"),
        ({"steps": 0}, "steps 0"),
        ({"samples": 1}, "samples 1"),
        ({"validation": 1.0}, "validation 1.0"),
        ({"lr": -1.0}, "lr -1.0"),
        ({"lr": 0.0}, "lr 0.0"),
        ({"warmup": -1}, "warmup -1"),
        ({"clip": 0.0}, "clip 0.0"),
        ({"weight_decay": -0.1}, "weight_decay -0.1"),
        ({"hidden": 0}, "hidden 0"),
    ],
)
def test_impossible_recipes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        replace(RECIPES["cpu"], **change)


def test_unknown_objective_is_refused() -> None:
    with pytest.raises(UnknownName, match="softcost"):
        KVPRecipe(objective="rlhf")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_layers_learn_apart(synthetic: TraceSet, name: str) -> None:
    """A layer trained alone gets the weights that it gets among the others, up to rounding: a processor's
    batched product of one layer need not add up in the order in which it adds up that of several.
    """
    config = replace(QUICK, objective=name)
    whole, cost = train(config, TrainingSet.prepare(config, synthetic))
    parts = [train(config, TrainingSet.prepare(config, synthetic, range(i, i + 1))) for i in range(LAYERS)]
    joined = ScorerWeights.joined([weights for weights, _ in parts])
    for part, tensor in joined.tensors().items():
        if part == "b2" and name in ("rl", "softsort"):  # moves all tokens alike: its gradient is rounding
            continue
        assert torch.allclose(tensor, whole.tensors()[part], atol=1e-5, rtol=0), part
    assert sum(one for _, one in parts) / LAYERS == pytest.approx(cost)


def test_sharded_training_writes_the_same_file(synthetic: TraceSet, tmp_path: Path) -> None:
    """Layers dealt out to two workers, the last one first; states are gone when the weights are there."""

    class Two(Local):
        def width(self) -> int:
            return 2

        def compute(self, hold: Hold, work: Work, jobs: Any) -> Iterator[tuple[int, Any]]:
            parts = pickle.loads(pickle.dumps((hold, work, list(jobs))))
            yield from reversed(list(Local().compute(*parts)))

    told: list[str] = []
    recipe = replace(QUICK, objective="softcost")
    command.train_file(recipe, synthetic.folder, tmp_path / "one.safetensors", told.append)
    card = command.train_sharded(recipe, synthetic.folder, tmp_path / "two.safetensors", told.append, Two())
    one, two = (read_weights(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    assert_same(one[0], two[0])
    assert one[1] == two[1]
    assert card["validation_cost"] == pytest.approx(one[2]["validation_cost"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.safetensors", "two.safetensors"]


def test_lost_layers_are_named_and_one_piece_is_refused(synthetic: TraceSet, tmp_path: Path) -> None:
    class Losing(Local):
        def compute(self, hold: Hold, work: Work, jobs: Any) -> Iterator[tuple[int, Any]]:
            yield 0, LostJob("its worker died")

    with pytest.raises(WorkersLost, match="layers 0 to 1 could not be trained: its worker died"):
        command.train_sharded(QUICK, synthetic.folder, tmp_path / "x.safetensors", print, Losing())
    asked = ["train", "--policy", "judgeq", "--traces", str(synthetic.folder), "--out", str(tmp_path / "y")]
    result = CliRunner().invoke(cli.app, [*asked, "--executor", "ray"])
    assert result.exit_code == cli.REFUSED
    assert "trained in one piece" in result.output
