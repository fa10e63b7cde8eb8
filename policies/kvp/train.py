"""Training KVP's agents offline from traces: all heads of a model together, on one machine.

Every step takes one trace and one split point n, and treats the tokens after n as the future (reference:
arXiv:2602.10238, section 3.2). Which (trace, split) each step uses is drawn in advance from the seed, so
the utilities of all its splits come from one pass over a trace, and resuming needs no generator state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvbench.config import parse_pins
from kvbench.errors import BadInput
from kvbench.eviction import eviction_cost
from kvbench.policy import Pins
from kvbench.trace import TraceSet, utilities

from . import checkpoint
from .objectives import BudgetWeighting, Step, objective
from .scorer import PositionFeature, ScorerShape, ScorerWeights, position_features, scores

Split = Literal["uniform", "boundary", "mix"]
LEAST = 32  # tokens before a split point: below, there is nothing to rank


@dataclass(frozen=True)
class TrainConfig:
    """A recipe. Paper values: hidden 256, lr 5e-5, 4000 steps, warm-up 100, clip 5, uniform splits.

    split: where the future begins; uniform over the trace, boundary (the end of the context, where
    compression happens), or mix (half and half). samples: permutations per step (K). budgets: weighting
    of the budgets in the reward. pins: FIRST,LAST tokens left out of the ranking, as at inference, or none.
    validation: share of the traces, the last ones, that only measure.
    """

    steps: int = 1500
    objective: str = "rl"
    split: Split = "mix"
    budgets: str = "uniform"
    position: PositionFeature = "log"
    hidden: int = 128
    samples: int = 8
    lr: float = 1e-3
    last_lr: float = 1e-6
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 5.0
    pins: str = "4,16"
    seed: int = 0
    validation: float = 0.1

    def __post_init__(self) -> None:
        objective(self.objective)
        BudgetWeighting.parse(self.budgets)
        if parse_pins(self.pins) is None:
            raise BadInput(f"--pins '{self.pins}': a recipe pins FIRST,LAST tokens, as in 4,16, or none")
        if self.split not in ("uniform", "boundary", "mix"):
            raise BadInput(f"--split '{self.split}': choose uniform, boundary or mix")
        if self.steps < 1 or self.samples < 2 or not 0 < self.validation < 1:
            raise BadInput(
                f"steps {self.steps}, samples {self.samples}, validation {self.validation}: "
                "steps are 1 or more, samples 2 or more, validation between 0 and 1"
            )
        if min(self.lr, self.clip, self.hidden) <= 0 or min(self.last_lr, self.warmup, self.weight_decay) < 0:
            raise BadInput(
                f"lr {self.lr}, clip {self.clip}, hidden {self.hidden}, last_lr {self.last_lr}, "
                f"warmup {self.warmup}, weight_decay {self.weight_decay}: "
                "the first three are more than 0, the others 0 or more"
            )

    @property
    def pinned(self) -> Pins:
        return parse_pins(self.pins) or Pins()


RECIPES = {
    "paper": TrainConfig(
        steps=4000, split="uniform", hidden=256, lr=5e-5, position="normalised", samples=8, validation=0.05
    ),
    "cpu": TrainConfig(objective="softcost"),
}


@dataclass
class Example:
    """Tokens before one split of one trace. keys, values: (agent, n, dim); utility: (agent, n)."""

    keys: Tensor
    values: Tensor
    utility: Tensor
    positions: Tensor

    def inputs(self, position: PositionFeature) -> Tensor:
        """(agent, token, inputs) float32."""
        features = position_features(self.positions, position).expand(self.keys.shape[0], -1, -1)
        return torch.cat([self.keys.float(), self.values.float(), features], -1)


@dataclass
class Curriculum:
    """Which trace and split each step uses, with the utilities already computed.

    visits: per step (trace, split). utility: the same keys -> (agent, n) float32.
    """

    traces: TraceSet
    visits: list[tuple[int, int]]
    utility: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _memory: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def draw(cls, traces: TraceSet, chosen: list[int], count: int, split: Split, seed: int) -> Curriculum:
        """`count` visits over the chosen traces, each trace as often as the others (+-1)."""
        generator = torch.Generator().manual_seed(seed)
        visits: list[tuple[int, int]] = []
        while len(visits) < count:
            for i in torch.randperm(len(chosen), generator=generator).tolist():
                info = traces.infos[chosen[i]]
                draw = torch.rand(2, generator=generator).tolist()
                at_boundary = split == "boundary" or (split == "mix" and draw[0] < 0.5)
                least = min(LEAST, info.tokens - 2)
                n = info.context if at_boundary else least + int(draw[1] * (info.tokens - 1 - least))
                visits.append((chosen[i], max(1, min(n, info.tokens - 1))))
        return cls(traces, visits[:count])

    def prepare(self, advance: Callable[[str], None] = lambda text: None) -> None:
        """Compute the utility of every visit, one pass per trace, and keep keys and values in memory."""
        for trace in sorted({trace for trace, _ in self.visits}):
            splits = sorted({n for t, n in self.visits if t == trace})
            found: list[list[Tensor]] = [[] for _ in splits]
            keys, values = [], []
            for layer in range(self.traces.layers):
                q, k, v = self.traces[trace].layer(layer)
                for i, u in enumerate(utilities(q, k, self.traces.infos[trace].scaling, splits)):
                    found[i].append(u)
                keys.append(k)
                values.append(v)
            self._memory[trace] = (torch.cat(keys), torch.cat(values))
            self.utility.update({(trace, n): torch.cat(u) for n, u in zip(splits, found, strict=True)})
            advance("utilities")

    def example(self, step: int, pins: Pins) -> Example:
        """The tokens that compete in this step: those before the split that are not pinned."""
        trace, n = self.visits[step]
        keys, values = self._memory[trace]
        first, stop = (pins.first, n - pins.last) if n > pins.total + 1 else (0, n)
        part = slice(first, stop)
        utility = self.utility[trace, n][:, part]
        return Example(keys[:, part], values[:, part], utility, torch.arange(first, stop))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up from 1% of lr, then cosine to last_lr."""
    if step < config.warmup:
        return config.lr * (0.01 + 0.99 * step / config.warmup)
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.last_lr + (config.lr - config.last_lr) * 0.5 * (1 + math.cos(math.pi * progress))


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
def validation_cost(weights: ScorerWeights, exam: Curriculum, config: TrainConfig) -> float:
    """Mean C(sigma)/C(sigma*) of the deterministic ranking over held-out visits and agents."""
    total = 0.0
    for step in range(len(exam.visits)):
        example = exam.example(step, config.pinned)
        total += _cost(scores(weights, example.inputs(config.position)), example.utility).mean().item()
    return total / len(exam.visits)


@dataclass
class Lesson:
    """A recipe's course and its exam on held-out traces, with utilities computed."""

    course: Curriculum
    exam: Curriculum

    @classmethod
    def prepare(
        cls, config: TrainConfig, traces: TraceSet, advance: Callable[[str], None] = lambda text: None
    ) -> Lesson:
        """Draw and compute what the recipe's steps need. Raises BadInput for too few traces."""
        held_out = max(1, round(len(traces) * config.validation))
        if len(traces) <= held_out:
            raise BadInput(f"{len(traces)} traces are too few to train and validate: record 2 or more")
        chosen = list(range(len(traces)))
        course = Curriculum.draw(traces, chosen[:-held_out], config.steps, config.split, config.seed)
        exam = Curriculum.draw(traces, chosen[-held_out:], 2 * held_out, "mix", config.seed + 1)
        course.prepare(advance)
        exam.prepare(advance)
        return cls(course, exam)


def train(
    config: TrainConfig,
    lesson: Lesson,
    resume: Path | None = None,
    report: Callable[[int, float, float | None], None] = lambda step, reward, cost: None,
) -> tuple[ScorerWeights, float]:
    """Train all agents; returns the weights and their validation cost.

    resume: a checkpoint file, continued from if it is there and rewritten every 100 steps. report:
    called with (step, mean reward of the step, validation cost every 100 steps).
    The same lesson, configuration and seed give the same weights, interrupted or not.
    """
    weights = _start(config, lesson)
    parameters = [tensor.requires_grad_() for tensor in weights.trained]
    optimiser = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    identity = {**asdict(config), "traces": lesson.course.traces.identity}
    first = checkpoint.restore(resume, parameters, optimiser, identity) if resume else 0
    cost = None
    for step in range(first, config.steps):
        reward = _step(config, lesson, weights, optimiser, step)
        cost = validation_cost(weights, lesson.exam, config) if _is_mark(config, step) else None
        report(step + 1, reward, cost)
        if resume and _is_mark(config, step):
            checkpoint.save(resume, parameters, optimiser, identity, step + 1)
    for tensor in parameters:
        tensor.requires_grad_(False)
    return weights, validation_cost(weights, lesson.exam, config) if cost is None else cost


def _is_mark(config: TrainConfig, step: int) -> bool:
    """Steps after which training is measured and saved: every hundredth, and the last."""
    return (step + 1) % 100 == 0 or step + 1 == config.steps


def _start(config: TrainConfig, lesson: Lesson) -> ScorerWeights:
    """Initial weights, inputs standardised on the first examples."""
    traces = lesson.course.traces
    shape = ScorerShape(traces.layers, traces.kv_heads, traces.dim, config.hidden, config.position)
    weights = ScorerWeights.initial(shape, torch.Generator().manual_seed(config.seed))
    examples = (lesson.course.example(step, config.pinned) for step in range(min(64, config.steps)))
    standardise(weights, examples, config.position)
    return weights


def _step(
    config: TrainConfig, lesson: Lesson, weights: ScorerWeights, optimiser: torch.optim.Optimizer, step: int
) -> float:
    """One update of all agents; returns the mean reward -C/C* of the ranking before it."""
    example = lesson.course.example(step, config.pinned)
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(config, step)
    found = scores(weights, example.inputs(config.position))
    weighting = BudgetWeighting.parse(config.budgets)
    losses = objective(config.objective)(found, Step(example.utility, weighting, config.samples, generator))
    optimiser.zero_grad()
    losses.sum().backward()
    clip_each_agent(weights.trained, config.clip)
    optimiser.step()
    return -_cost(found.detach(), example.utility).mean().item()


def _cost(found: Tensor, utility: Tensor) -> Tensor:
    """C(sigma)/C(sigma*) of the deterministic ranking, (agent,)."""
    return eviction_cost(found.argsort(-1, descending=True), utility)
