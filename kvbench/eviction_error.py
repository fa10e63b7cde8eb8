"""`kvbench eviction-error`: how well policies rank recorded tokens.

For every trace and split point, each policy ranks the tokens before the split from recorded queries, keys
and values; the recorded future says what each ranking cost. No model is called, but for policies that
read extra tokens: the traces' model reads those, and nothing else, after the recorded keys and values. One
row per (policy, budget, trace), in the schema of a run, so `table` and `plot` read them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import Cell, fingerprint, parse_pins
from .errors import BadInput
from .eviction import eviction_cost, missed_mass
from .models import LoadedModel, open_model
from .observe import Observation, Probed, draw_key
from .plan import check_trained
from .policy import Need, Pins, Policy, TrainedFor
from .probe import probe_trace
from .progress import progress as progress_bar
from .rank import keep, rank
from .registry import POLICIES, expand_policies, spec_of
from .results import Store
from .runner import style_of
from .score import validated_score
from .trace import Trace, TraceSet, utilities

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


def measure(config: ErrorConfig, progress: bool = True) -> tuple[Path, dict[str, list[list[float]]]]:
    """Rank every trace with every policy; returns the run folder and, per policy, the mean eviction cost
    of each (full layer, KV head).

    Raises KvbenchError for unknown names, missing traces, or policies that need what traces lack.
    """
    traces = TraceSet(config.traces)
    policies = _policies(config, traces)
    chosen = list(traces)[: config.limit]
    if not chosen:
        raise BadInput(f"{config.traces} holds no trace yet: record some with kvbench trace")
    out = Path(config.out or f"results/eviction-error-{fingerprint(asdict(config))[:8]}")
    fixed = {"traces": traces.header, "split": config.split, "seed": config.seed}
    extra = {
        "style": style_of(policies),
        "tasks": {TASK: {"metric": "eviction_cost", "source": "arXiv:2602.10238", "data": "recorded traces"}},
    }
    lm = _reader(traces, policies)
    heads: dict[str, list[Tensor]] = {}
    with Store.open(out, fixed, extra) as store, progress_bar(progress, len(chosen), "traces") as advance:
        for trace in chosen:
            store.append(_rows(config, traces, trace, _Measured(policies, heads, lm)))
            advance(trace.info.task)
    return out, {spec: torch.stack(costs).mean(0).tolist() for spec, costs in heads.items()}


def _policies(config: ErrorConfig, traces: TraceSet) -> list[Policy]:
    """The policies, each once, all of them fit for the traces' model."""
    parsed = [POLICIES.parse(spec) for spec in expand_policies(config.policies)]
    policies = list({spec_of(policy): policy for policy in parsed}.values())
    model = TrainedFor(traces.layers, traces.kv_heads, traces.dim, traces.header["model_sha256"])
    for policy in policies:
        check_trained(policy, traces.header["model"], model)
    return policies


def _reader(traces: TraceSet, policies: list[Policy]) -> LoadedModel | None:
    """The model that recorded the traces, where a policy has extra tokens for it to read."""
    if not any(Need.PROBE in policy.needs for policy in policies):
        return None
    opened = open_model(traces.header["model"], "cpu", traces.header["model_dtype"])
    if opened.sha256 != traces.header["model_sha256"]:
        raise BadInput(
            f"{traces.folder} was recorded with another model under the name {opened.name}: record it again"
        )
    return opened.load()


@dataclass(frozen=True)
class _Measured:
    """The policies; their costs so far (spec -> per trace (layer, kv_head)); the model for extra tokens."""

    policies: list[Policy]
    heads: dict[str, list[Tensor]]
    lm: LoadedModel | None

    def probes(self, trace: Trace, splits: list[int]) -> dict[tuple[int, str], list[Probed]]:
        """Extra tokens of every layer by (split, policy); policies with equal ones share a pass."""
        found: dict[tuple[int, str], list[Probed]] = {}
        for i, n in enumerate(splits):
            read: list[tuple[Tensor, list[Probed]]] = []
            for policy in self.policies:
                tokens = policy.probe
                if self.lm is None or tokens is None or Need.PROBE not in policy.needs:
                    continue
                same = next((one for known, one in read if torch.equal(known, tokens)), None)
                if same is None:
                    read.append((tokens, same := probe_trace(self.lm, trace, n, policy)))
                found[i, spec_of(policy)] = same
        return found


def _splits(config: ErrorConfig, trace: Trace) -> list[int]:
    """Split points of a trace, ascending."""
    if config.split == "boundary":
        return [max(1, trace.info.context)]
    generator = torch.Generator().manual_seed(draw_key(config.seed, trace.info.id) & 0x7FFFFFFF)
    least = min(32, trace.info.tokens - 2)
    points = torch.rand(config.splits, generator=generator) * (trace.info.tokens - 1 - least) + least
    return sorted({int(point) for point in points.tolist()})


@torch.inference_mode()
def _rows(
    config: ErrorConfig,
    traces: TraceSet,
    trace: Trace,
    measured: _Measured,
) -> list[dict[str, Any]]:
    """All rows of one trace: splits of one trace are not independent, so a row has their mean."""
    splits = _splits(config, trace)
    asked = parse_pins(config.pins)
    policies, probes = measured.policies, measured.probes(trace, splits)
    orders: dict[tuple[int, str], list[Tensor]] = {}
    utility: list[list[Tensor]] = [[] for _ in splits]
    for layer in range(traces.layers):
        q, k, v = (part.float() for part in trace.layer(layer))
        found = utilities(q, k, trace.info.scaling, splits)
        for i, n in enumerate(splits):
            utility[i].append(found[i])
            seen = _observation(config, traces, trace, layer, (q[:, :n], k[:, :n], v[:, :n]), found[i])
            for policy in policies:
                pins = policy.pins if asked is None else asked
                shown = seen
                if probed := probes.get((i, spec_of(policy))):
                    shown = replace(seen, _probe=probed[layer], _queries=q[None, :, :0], _shared={})
                order = rank(validated_score(policy, shown), seen.positions, pins, n)[0]
                orders.setdefault((i, spec_of(policy)), []).append(order)
    stacked = [torch.stack(layers) for layers in utility]  # per split (layer, kv_head, n)
    rows = []
    for policy in policies:
        spec = spec_of(policy)
        ranked = [torch.stack(orders[i, spec]) for i in range(len(splits))]
        costs = torch.stack([eviction_cost(o, u) for o, u in zip(ranked, stacked, strict=True)]).mean(0)
        measured.heads.setdefault(spec, []).append(costs)
        pins = policy.pins if asked is None else asked
        for budget in config.budgets:
            missed = [missed_mass(keep(o, budget), u).mean() for o, u in zip(ranked, stacked, strict=True)]
            metrics = {"eviction_cost": costs.mean().item(), "missed_mass": torch.stack(missed).mean().item()}
            rows.append(_row(config, traces, trace, splits, policy, pins, budget, metrics))
    return rows


def _observation(
    config: ErrorConfig, traces: TraceSet, trace: Trace, layer: int,
    recorded: tuple[Tensor, Tensor, Tensor], future: Tensor,
) -> Observation:  # fmt: skip
    """What a policy sees of one recorded layer, as if its n tokens had just been prefilled."""
    q, k, v = recorded
    n = k.shape[1]
    return Observation(
        layer=layer,
        n_layers=traces.layers,
        full_index=layer,
        keys=k[None],
        values=v[None],
        positions=torch.arange(n).expand(1, k.shape[0], -1),
        new=n,
        seen=n,
        scaling=trace.info.scaling,
        module=None,
        key=draw_key(config.seed, trace.info.id),
        _queries=q[None],
        _future=lambda: future[None],
    )


def _row(
    config: ErrorConfig, traces: TraceSet, trace: Trace, splits: list[int], policy: Policy, pins: Pins,
    budget: int, metrics: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """One row in the schema of a run."""
    cell = Cell(policy.name, tuple(asdict(policy).items()), budget, pins, "prefill", None)
    settings = {
        **cell.as_dict(),
        "weights": policy.identity,
        "task": TASK,
        "task_params": {"split": config.split},
        "model": traces.header["model"],
        "question": "withheld",
        "template": "recorded",
        "seed": config.seed,
    }
    sample = f"{trace.info.id}@{'+'.join(map(str, splits))}"
    tokens = sum(splits) / len(splits)
    identity = fingerprint([settings, traces.header])
    return {
        "key": fingerprint([identity, sample]),
        "config": identity,
        **settings,
        "spec": spec_of(policy),
        "task_spec": f"{TASK}:split={config.split}",
        "pins_mode": config.pins,
        "sample": sample,
        "context_tokens": round(tokens),
        "question_tokens": trace.info.tokens - round(tokens),
        "kept": round(sum(min(budget, n) for n in splits) / len(splits)),
        "peak": max(splits),
        "layers": traces.layers,
        "evicted_layers": traces.layers,
        "status": "ok",
        "reason": "",
        "note": "",
        "text": "",
        "gold_label": None,
        "label": None,
        "metrics": metrics,
        "times": {},
    }
