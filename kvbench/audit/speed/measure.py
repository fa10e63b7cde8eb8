"""`kvbench speed`: what each stage of eviction costs, for any policies and context lengths.

One row per (policy, length, repeat) in the schema of a run, so `table` and `plot` read them. Speed does
not depend on what is read, so the prompt is filler text, cut to an exact number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from ...contract.cell import FULL, Cell
from ...contract.data import filler
from ...contract.identity import fingerprint
from ...contract.look import style_of
from ...contract.need import Need
from ...contract.pins import Pins
from ...contract.policy import Policy
from ...contract.registry import POLICIES, expand_policies, spec_of
from ...engine.ranking import Ranker
from ...errors import BadInput
from ...model.geometry import Geometry
from ...model.memory import can_reset
from ...model.open import LoadedModel, OpenModel, open_model
from ...store.manifest import machine
from ...store.results import Row, Store, check_writable, read_rows
from ...study.plan import check_fits
from ...study.progress import progress as progress_bar
from .flops import matmul_rate, prefill_flops
from .stages import Passed, run_stages

if TYPE_CHECKING:
    from torch import Tensor

TASK = "speed"
WARM_UP = 256  # tokens read before anything is timed: libraries choose their kernels at the first use


@dataclass(frozen=True)
class SpeedConfig:
    """What to measure.

    lengths: tokens of context; more than the model was made for is allowed, because only the time is
    looked at. budget: what each policy compacts to. new_tokens: decoded from each cache. repeat: passes
    per length; the table shows medians.
    """

    policies: tuple[str, ...]
    lengths: tuple[int, ...] = (512, 1024, 2048)
    budget: int = 256
    new_tokens: int = 32
    repeat: int = 3
    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "auto"
    out: str | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "new_tokens", "repeat"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 1 or more")
        if not self.lengths or min(self.lengths) < 2:
            raise BadInput(f"--lengths {','.join(map(str, self.lengths))}: give token counts of 2 or more")
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))


@dataclass(frozen=True)
class SpeedResult:
    """rows: one per (policy, length, repeat). notes: what a reader of the numbers must know."""

    rows: pd.DataFrame
    path: Path
    notes: list[str]


def speed(config: SpeedConfig, progress: bool = True) -> SpeedResult:
    """Measure what is missing in the run folder, and return all rows of this configuration.

    Raises KvbenchError for anything that cannot be measured, before the weights load.
    """
    path = Path(config.out or _default_folder(config))
    check_writable(path)
    policies, notes = _policies(config)
    opened = open_model(config.model, config.device, config.dtype)
    for policy in policies:
        check_fits(policy, opened)
    fixed = _fixed(opened)
    extra = {"style": style_of(policies), "tasks": {TASK: {"metric": "score_s", "source": "measured here"}}}
    plan = _SpeedPlan(config, policies, fixed, opened.geometry)
    with Store.open(path, fixed, extra) as store:
        missing = [item for item in plan.passes() if not plan.keys(*item) <= store.done]
        if missing:
            _measure(plan, missing, opened.load(), store, progress)
        notes += store.notes
    if len(missing) < config.repeat * len(config.lengths):
        notes.append(f"some or all of this was measured before, in {path}; another --out measures it again")
    limit = opened.geometry.max_length
    if beyond := [n for n in config.lengths if n > limit]:
        told = ", ".join(map(str, beyond))
        notes.append(f"{told} tokens are beyond the {limit} that the model was made for: read times only")
    if not can_reset([opened.device]):
        notes.append("this system does not tell the peak memory of a stage; peaks are left out")
    rows = read_rows(path)
    return SpeedResult(rows[rows["key"].isin(plan.all_keys())].reset_index(drop=True), path, notes)


def _policies(config: SpeedConfig) -> tuple[list[Policy], list[str]]:
    """The policies, each once; those that look at the future have no cost to measure."""
    found: dict[str, Policy] = {}
    notes = []
    for spec in expand_policies(config.policies):
        policy: Policy = POLICIES.parse(spec)
        if Need.FUTURE not in policy.needs:
            found[spec_of(policy)] = policy
            continue
        reason = f"{spec} reads the future, which costs whatever the future costs"
        if spec in config.policies:
            raise BadInput(f"{reason}: nothing to measure, leave it out")
        notes.append(f"{spec} is left out: it reads the future")
    return list(found.values()), notes


def _fixed(opened: OpenModel) -> dict[str, Any]:
    """What times depend on besides policy and length: rows of two machines do not mix."""
    cuda = opened.device.type == "cuda"
    return {
        "model": opened.name,
        "model_sha256": opened.sha256,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "device": opened.device.type,
        "hardware": torch.cuda.get_device_name(opened.device) if cuda else machine()["cpu"],
        "threads": torch.get_num_threads(),
    }


def _default_folder(config: SpeedConfig) -> str:
    own = {
        key: value for key, value in asdict(config).items() if key not in ("policies", "lengths", "repeat")
    }
    return f"results/speed-{config.model.replace('/', '_').strip('._')[-40:]}-{fingerprint(own)[:8]}"


class _SpeedPlan:
    """The rows to measure and their identities."""

    def __init__(
        self, config: SpeedConfig, policies: list[Policy], fixed: dict[str, Any], geometry: Geometry
    ) -> None:
        self.config = config
        self.fixed = fixed
        self.geometry = geometry
        self.rankers = [Ranker(policy, policy.pins) for policy in policies]
        full = Cell(FULL, (), None, Pins(), "prefill", None)
        self.cells: dict[Ranker | None, Cell] = {None: full}
        for ranker in self.rankers:
            params = tuple(asdict(ranker.policy).items())
            cell = Cell(ranker.policy.name, params, config.budget, ranker.pins, "prefill", None)
            self.cells[ranker] = cell

    def passes(self) -> Iterator[tuple[int, int]]:
        """(length, repeat) of every pass; repeats of one length lie apart in time."""
        for repeat in range(self.config.repeat):
            for length in self.config.lengths:
                yield length, repeat

    def keys(self, length: int, repeat: int) -> set[str]:
        return {self.blank(ranker, length, repeat).key for ranker in self.cells}

    def all_keys(self) -> set[str]:
        return set().union(*(self.keys(*item) for item in self.passes()))

    def blank(self, ranker: Ranker | None, length: int, repeat: int) -> Row:
        """A row with what is known before anything is measured; what it comes from is this machine."""
        configuration = {
            **self.cells[ranker].as_dict(),
            "weights": ranker.policy.identity if ranker else "",
            "task": TASK,
            "task_params": {"length": length, "new_tokens": self.config.new_tokens},
            "model": self.fixed["model"],
            "question": "withheld",
            "template": "none",
            "seed": 0,
        }
        return Row.of(
            configuration,
            f"repeat-{repeat}",
            source=self.fixed,
            spec=spec_of(ranker.policy) if ranker else FULL,
            task_spec=f"{TASK}:length={length}",
            pins_mode="native" if ranker else "none",
            context_tokens=length,
            layers=self.geometry.layers,
            evicted_layers=len(self.geometry.full_layers) if ranker else 0,
        )


def _measure(
    plan: _SpeedPlan, missing: list[tuple[int, int]], lm: LoadedModel, store: Store, progress: bool
) -> None:
    config = plan.config
    ids = _filler_ids(lm, max(config.lengths))
    run_stages(lm, ids[:WARM_UP], plan.rankers, config.budget, 2)
    with progress_bar(progress, len(missing), "passes") as advance:
        for length, repeat in missing:
            wanted = [r for r in plan.rankers if plan.blank(r, length, repeat).key not in store.done]
            passed = run_stages(lm, ids[:length], wanted, config.budget, config.new_tokens)
            rate = matmul_rate(lm.device, lm.dtype)
            rows = [_full_row(plan, lm, passed, (length, repeat), rate)]
            rows += [_row(plan, passed, ranker, (length, repeat)) for ranker in wanted]
            store.append([row for row in rows if row.key not in store.done])
            advance(f"{length} tokens")


def _filler_ids(lm: LoadedModel, count: int) -> Tensor:
    """`count` tokens of English text, which begins again when it ends."""
    text = filler()[: 8 * count]  # a token has about 4 characters
    ids = lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor((ids * (-(-count // len(ids))))[:count], device=lm.device)


def _full_row(plan: _SpeedPlan, lm: LoadedModel, passed: Passed, item: tuple[int, int], rate: float) -> Row:
    """The cache without eviction: prefill and decoding, and what the device can do."""
    full = passed.full
    return replace(
        plan.blank(None, *item),
        kept=full.kept,
        metrics={"kv_bytes": full.kv_bytes, "prefill_flops": prefill_flops(lm, item[0])},
        times={
            "prefill_s": passed.prefill.seconds,
            "matmul_rate": rate,
            "decode_rate": plan.config.new_tokens / full.decode.seconds,
            **_peak(max(passed.prefill.peak, full.peak)),
        },
    )


def _row(plan: _SpeedPlan, passed: Passed, ranker: Ranker, item: tuple[int, int]) -> Row:
    """One policy; its peak is that of the prefill where the policy itself needs less."""
    stages = passed.policies[ranker]
    row = plan.blank(ranker, *item)
    if stages.failed:
        return replace(row, status="failed", reason=stages.failed)
    return replace(
        row,
        kept=stages.kept,
        score_layers_s=stages.score,
        metrics={"kv_bytes": stages.kv_bytes, "score_flops": stages.score_flops},
        times={
            "prefill_s": passed.prefill.seconds,
            "score_s": stages.scoring.seconds,
            "rank_s": stages.rank.seconds,
            "compact_s": stages.compact.seconds,
            "decode_rate": plan.config.new_tokens / stages.decode.seconds,
            **_peak(max(passed.prefill.peak, stages.peak)),
        },
    )


def _peak(count: int) -> dict[str, int]:
    return {"peak_bytes": count} if count else {}
