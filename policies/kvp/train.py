"""Training KVP's agents offline from traces: all heads of a model, or of some layers, together.

The updates only; which trace and future each step sees is in `course`, the settings in `recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from kvbench.contract.eviction import eviction_cost
from kvbench.contract.weights import restore_state, save_state
from kvbench.learn.training import learning_rate

from .course import Curriculum, Example, TrainingSet
from .objectives import BudgetWeighting, Step, objective
from .recipe import KVPRecipe
from .scorer import PositionFeature, ScorerShape, ScorerWeights, scores


def clip_each_agent(parameters: list[Tensor], limit: float) -> None:
    """Scale each agent's gradient to a norm of at most `limit`; agents do not share one norm."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
    factor = (limit / (norm + 1e-12)).clamp(max=1)
    for grad in grads:
        grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))


def standardise(weights: ScorerWeights, examples: Iterator[Example], position: PositionFeature) -> None:
    """Set mean and scale from examples, so that every input has mean 0 and deviation 1 per agent."""
    total = torch.zeros(weights.mean.shape, dtype=torch.float64)
    squares, count = torch.zeros_like(total), 0
    for example in examples:
        x = example.inputs(position).double()
        total += x.sum(1)
        squares += x.square().sum(1)
        count += x.shape[1]
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    weights.mean = mean.float()
    weights.scale = torch.where(deviation > 1e-6, 1 / deviation, 0.0).float()


@torch.no_grad()
def validation_cost(weights: ScorerWeights, exam: Curriculum, config: KVPRecipe) -> float:
    """Mean C(sigma)/C(sigma*) of the deterministic ranking over held-out visits and agents."""
    total = 0.0
    for step in range(len(exam.visits)):
        example = exam.example(step, config.pinned_at(step))
        total += _cost(scores(weights, example.inputs(config.position)), example.utility).mean().item()
    return total / len(exam.visits)


def train(
    config: KVPRecipe,
    lesson: TrainingSet,
    resume: Path | None = None,
    report: Callable[[int, float, float | None], None] = lambda step, reward, cost: None,
) -> tuple[ScorerWeights, float]:
    """Train the agents of the lesson's layers; returns the weights and their validation cost.

    resume: a checkpoint file, continued from if it is there and rewritten every 100 steps. report:
    called with (step, mean reward of the step, validation cost every 100 steps).
    The same lesson, configuration and seed give the same weights, interrupted or not. An agent's weights do
    not depend on which others are trained with it (with `rl` up to rounding: its sums over permutations
    are vectorised over the agents).
    """
    weights = _start(config, lesson)
    parameters = [tensor.requires_grad_() for tensor in weights.trained]
    optimiser = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    identity = {**asdict(config), "traces": lesson.course.traces.identity}
    if len(lesson.layers) < lesson.course.traces.layers:
        identity["layers"] = [lesson.layers.start, lesson.layers.stop]
    first = restore_state(resume, parameters, optimiser, identity)[0] if resume else 0
    cost = None
    for step in range(first, config.steps):
        reward = _step(config, lesson, weights, optimiser, step)
        cost = validation_cost(weights, lesson.exam, config) if _is_mark(config, step) else None
        report(step + 1, reward, cost)
        if resume and _is_mark(config, step):
            save_state(resume, parameters, optimiser, identity, step + 1)
    for tensor in parameters:
        tensor.requires_grad_(False)
    return weights, validation_cost(weights, lesson.exam, config) if cost is None else cost


def _is_mark(config: KVPRecipe, step: int) -> bool:
    """Steps after which training is measured and saved: every hundredth, and the last."""
    return (step + 1) % 100 == 0 or step + 1 == config.steps


def _start(config: KVPRecipe, lesson: TrainingSet) -> ScorerWeights:
    """Initial weights, inputs standardised on the first examples."""
    traces = lesson.course.traces
    shape = ScorerShape(traces.layers, traces.kv_heads, traces.dim, config.hidden, config.position)
    every = ScorerWeights.initial(shape, torch.Generator().manual_seed(config.seed))
    weights = every.part(lesson.agents).copy()
    examples = (lesson.course.example(step, config.pinned_at(step)) for step in range(min(64, config.steps)))
    standardise(weights, examples, config.position)
    return weights


def _step(
    config: KVPRecipe,
    lesson: TrainingSet,
    weights: ScorerWeights,
    optimiser: torch.optim.Optimizer,
    step: int,
) -> float:
    """One update of all agents; returns the mean reward -C/C* of the ranking before it."""
    example = lesson.course.example(step, config.pinned_at(step))
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(config, step)
    found = scores(weights, example.inputs(config.position))
    weighting = BudgetWeighting.parse(config.budgets)
    traces = lesson.course.traces
    inputs = Step(
        example.utility, weighting, config.samples, generator, lesson.agents, traces.layers * traces.kv_heads
    )
    losses = objective(config.objective)(found, inputs)
    optimiser.zero_grad()
    losses.sum().backward()
    clip_each_agent(weights.trained, config.clip)
    optimiser.step()
    return -_cost(found.detach(), example.utility).mean().item()


def _cost(found: Tensor, utility: Tensor) -> Tensor:
    """C(sigma)/C(sigma*) of the deterministic ranking, (agent,)."""
    return eviction_cost(found.argsort(-1, descending=True), utility)
