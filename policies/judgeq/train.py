"""Training JudgeQ's soft tokens: n rows of input embeddings get gradients, the model is frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvbench.contract.eviction import eviction_cost
from kvbench.contract.weights import restore_state, save_state
from kvbench.errors import BadInput
from kvbench.learn.trace import TraceSet, utilities
from kvbench.learn.training import draw_visits, held_out, learning_rate
from kvbench.model.open import LoadedModel

from .lesson import Lesson, read_soft, save_memory
from .recipe import JudgeQRecipe

MEASURED = 50  # steps between two measurements


@dataclass
class Curve:
    """How training went. steps, loss, cost: after so many steps, validation loss and eviction cost.

    training: the loss of every step.
    """

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Exam:
    """Held-out contexts with their utility, per layer (kv_head, n)."""

    lessons: list[Lesson]
    utility: list[Tensor]

    @classmethod
    def prepare(cls, traces: TraceSet, visits: list[tuple[int, int]], device: torch.device) -> Exam:
        exam = cls([], [])
        for index, n in visits:
            trace = traces[index]
            layers = [trace.layer(layer) for layer in range(traces.layers)]
            found = [utilities(q.float(), k.float(), trace.info.scaling, [n])[0] for q, k, _ in layers]
            exam.lessons.append(Lesson.of(trace, traces.layers, n, device))
            exam.utility.append(torch.stack(found).to(device))
        return exam

    @torch.no_grad()
    def measure(self, lm: LoadedModel, tokens: Tensor) -> tuple[float, float]:
        """Mean loss, and mean eviction cost of the ranking by attention, mean over a group's heads."""
        losses, costs = [], []
        for lesson, utility in zip(self.lessons, self.utility, strict=True):
            seen = read_soft(lm, lesson, tokens)
            losses.append(seen.loss().item())
            shown = torch.stack([seen.shown[layer] for layer in range(len(utility))])
            score = shown.unflatten(1, (utility.shape[1], -1)).mean(2)  # (layer, kv_head, n)
            order = score.argsort(-1, descending=True)
            costs.append(eviction_cost(order, utility).mean().item())
        return sum(losses) / len(losses), sum(costs) / len(costs)


def initial_rows(config: JudgeQRecipe, lm: LoadedModel) -> Tensor:
    """Embeddings of real tokens: (tokens, d_model) float32. Raises BadInput for a text without tokens."""
    table = lm.model.get_input_embeddings().weight.detach()
    if config.start == "vocabulary":
        generator = torch.Generator().manual_seed(config.seed)
        special = set(lm.tokenizer.all_special_ids)
        known = [i for i in range(min(len(table), len(lm.tokenizer))) if i not in special]
        picked = torch.randperm(len(known), generator=generator)[: config.tokens].tolist()
        ids = [known[i] for i in picked]
    else:
        ids = lm.tokenizer(config.start, add_special_tokens=False)["input_ids"]
    if not ids:
        raise BadInput(f"--start '{config.start}' has no tokens: give a longer text, or vocabulary")
    repeated = [ids[i % len(ids)] for i in range(config.tokens)]
    return table[torch.tensor(repeated, device=table.device)].float().clone()


def train(
    config: JudgeQRecipe,
    traces: TraceSet,
    lm: LoadedModel,
    resume: Path | None = None,
    report: Callable[[int, Curve], None] = lambda step, curve: None,
) -> tuple[Tensor, Curve]:
    """Train the soft tokens; returns their rows (tokens, d_model) and how it went.

    resume: a state file, continued from if it is there and rewritten at every measurement. report:
    called after each of these. The same traces, configuration and seed give the same rows, interrupted
    or not.
    """
    if config.checkpointing:
        save_memory(lm)
    learned, kept = held_out(traces, config.validation)
    visits = draw_visits(traces, learned, config.steps * config.batch, config.split, config.seed)
    exam = Exam.prepare(traces, draw_visits(traces, kept, len(kept), config.split, 0), lm.device)
    rows = initial_rows(config, lm).requires_grad_()
    optimiser = torch.optim.Adam([rows], lr=config.lr)
    identity = {**asdict(config), "traces": traces.identity, "model": lm.sha256}
    first, notes = restore_state(resume, [rows], optimiser, identity) if resume else (0, None)
    curve = Curve(**notes) if notes else Curve()
    if first == 0:
        _measure(exam, lm, rows, curve, 0)
        report(0, curve)
    for step in range(first, config.steps):
        part = visits[step * config.batch : (step + 1) * config.batch]
        lessons = [Lesson.of(traces[index], traces.layers, n, lm.device) for index, n in part]
        curve.training.append(_step(config, lm, lessons, rows, optimiser, step))
        if (step + 1) % MEASURED == 0 or step + 1 == config.steps:
            _measure(exam, lm, rows, curve, step + 1)
            report(step + 1, curve)
            if resume:
                save_state(resume, [rows], optimiser, identity, step + 1, vars(curve))
    return rows.detach(), curve


def _step(
    config: JudgeQRecipe, lm: LoadedModel, lessons: list[Lesson], rows: Tensor,
    optimiser: torch.optim.Optimizer, step: int,
) -> float:  # fmt: skip
    """One update; returns the mean loss before it."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate(config, step)
    optimiser.zero_grad()
    total = 0.0
    for lesson in lessons:
        loss = read_soft(lm, lesson, rows).loss() / len(lessons)
        loss.backward()
        total += loss.item()
    optimiser.step()
    return total


def _measure(exam: Exam, lm: LoadedModel, rows: Tensor, curve: Curve, step: int) -> None:
    loss, cost = exam.measure(lm, rows)
    curve.steps.append(step)
    curve.loss.append(loss)
    curve.cost.append(cost)
