"""`kvbench eviction-error`: how well policies rank recorded tokens.

For every trace and split point, each policy ranks the tokens before the split from recorded queries, keys
and values (see `learn.ranked`); the recorded future says what each ranking cost. One row per (policy,
budget, trace), in the schema of a run, so `table` and `plot` read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..contract.cell import Cell
from ..contract.draws import draw_key
from ..contract.eviction import eviction_cost, missed_mass
from ..contract.identity import fingerprint
from ..contract.look import style_of
from ..contract.pins import parse_pins
from ..contract.policy import Policy
from ..contract.registry import spec_of
from ..engine.order import keep
from ..errors import BadInput
from ..store.results import Row, Store
from ..study.progress import progress as progress_bar
from .ranked import RecordedRanker, boundary
from .trace import Trace, TraceSet

TASK = "traces"


@dataclass(frozen=True)
class ErrorConfig:
    """What to measure. split: uniform points over the trace, or the boundary (end of the context).

    splits: uniform points per trace. pins: native, none, or FIRST,LAST. per_head: also write the mean
    cost of every (layer, KV head) to per_head.json.
    """

    traces: str
    policies: tuple[str, ...]
    budgets: tuple[int, ...] = (32, 64, 128, 256)
    split: str = "boundary"
    splits: int = 4
    pins: str = "none"
    seed: int = 0
    limit: int | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        if self.split not in ("uniform", "boundary"):
            raise BadInput(f"--split '{self.split}': choose uniform or boundary")
        parse_pins(self.pins)
        if any(budget < 1 for budget in self.budgets) or self.splits < 1:
            raise BadInput("budgets and splits are whole numbers from 1 on")
        if self.limit is not None and self.limit < 1:
            raise BadInput(f"--limit {self.limit}: must be 1 or more")


def measure(
    config: ErrorConfig, progress: bool = True, announce: Callable[[str], None] = lambda text: None
) -> tuple[Path, dict[str, list[list[float]]]]:
    """Rank every trace with every policy; returns the run folder and, per policy, the mean eviction cost
    of each (full layer, KV head).

    announce: is told what "all" brought and traces cannot rank.
    Raises KvbenchError for unknown names, missing traces, or policies that need what traces lack.
    """
    traces = TraceSet(config.traces)
    ranker = RecordedRanker.open(traces, config.policies, config.pins, config.seed)
    for note in ranker.left_out:
        announce(f"note: {note}")
    chosen = list(traces)[: config.limit]
    if not chosen:
        raise BadInput(f"{config.traces} holds no trace yet: record some with kvbench trace")
    out = Path(config.out or f"results/eviction-error-{fingerprint(asdict(config))[:8]}")
    fixed = {"traces": traces.header, "split": config.split, "seed": config.seed}
    extra = {
        "style": style_of(ranker.policies),
        "tasks": {TASK: {"metric": "eviction_cost", "source": "arXiv:2602.10238", "data": "recorded traces"}},
    }
    heads: dict[str, list[Tensor]] = {}
    with Store.open(out, fixed, extra) as store, progress_bar(progress, len(chosen), "traces") as advance:
        for trace in chosen:
            store.append(_rows(config, ranker, trace, heads))
            advance(trace.info.task)
    return out, {spec: torch.stack(costs).mean(0).tolist() for spec, costs in heads.items()}


def _splits(config: ErrorConfig, trace: Trace) -> list[int]:
    """Split points of a trace, ascending."""
    if config.split == "boundary":
        return boundary(trace)
    generator = torch.Generator().manual_seed(draw_key(config.seed, trace.info.id) & 0x7FFFFFFF)
    least = min(32, trace.info.tokens - 2)
    points = torch.rand(config.splits, generator=generator) * (trace.info.tokens - 1 - least) + least
    return sorted({int(point) for point in points.tolist()})


def _rows(
    config: ErrorConfig, ranker: RecordedRanker, trace: Trace, heads: dict[str, list[Tensor]]
) -> list[Row]:
    """All rows of one trace: splits of one trace are not independent, so a row has their mean.

    heads: gets each policy's costs of this trace, (layer, kv_head).
    """
    ranked = ranker.rank(trace, _splits(config, trace), tolerant=True)
    rows = []
    for policy in ranker.policies:
        spec, splits = spec_of(policy), [one.split for one in ranked]
        if reason := ranked[0].failures.get(spec):
            for budget in config.budgets:
                rows.append(
                    _row(config, ranker, trace, splits, policy, budget, status="failed", reason=reason)
                )
            continue
        costs = torch.stack([eviction_cost(one.orders[spec], one.utility) for one in ranked]).mean(0)
        heads.setdefault(spec, []).append(costs)
        for budget in config.budgets:
            missed = [missed_mass(keep(one.orders[spec], budget), one.utility).mean() for one in ranked]
            metrics = {"eviction_cost": costs.mean().item(), "missed_mass": torch.stack(missed).mean().item()}
            rows.append(_row(config, ranker, trace, splits, policy, budget, metrics=metrics))
    return rows


def _row(
    config: ErrorConfig, ranker: RecordedRanker, trace: Trace, splits: list[int], policy: Policy, budget: int,
    **known: Any,
) -> Row:  # fmt: skip
    """One row; what it comes from are the traces. known: what was measured, or why not."""
    traces = ranker.traces
    cell = Cell(policy, budget, ranker.pins_of(policy))
    configuration = {
        **cell.as_dict(),
        "weights": policy.identity,
        "task": TASK,
        "task_params": {"split": config.split},
        "model": traces.header["model"],
        "question": "withheld",
        "template": "recorded",
        "seed": config.seed,
    }
    tokens = sum(splits) / len(splits)
    return Row.of(
        configuration,
        f"{trace.info.id}@{'+'.join(map(str, splits))}",
        source=traces.header,
        spec=cell.spec,
        task_spec=f"{TASK}:split={config.split}",
        pins_mode=config.pins,
        context_tokens=round(tokens),
        question_tokens=trace.info.tokens - round(tokens),
        kept=round(sum(min(budget, n) for n in splits) / len(splits)),
        peak=max(splits),
        layers=traces.layers,
        evicted_layers=traces.layers,
        **known,
    )
