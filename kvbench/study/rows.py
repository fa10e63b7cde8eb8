"""From measurements to rows: one line per (cell, sample), with everything needed to read it alone."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..contract.cell import Cell
from ..contract.registry import spec_of
from ..contract.task import Sample, guarded
from ..errors import PluginError
from ..store.row import Row

if TYPE_CHECKING:
    from ..engine.measure import Measurement
    from ..model.open import LoadedModel
    from ..model.prompt import Prompt
    from .workload import Workload

NO_CONTEXT = (
    "nothing precedes the question, so with it withheld there is no context to evict, at most a template"
)


def sample_rows(
    work: Workload, lm: LoadedModel, sample: Sample, prompt: Prompt | str, wanted: Set[str]
) -> list[Row]:
    """Evaluate the cells behind the wanted keys; a skipped sample gives its reason in each of its rows."""
    from ..contract.draws import draw_key
    from ..engine.evaluate import evaluate
    from ..engine.measure import Failure

    if isinstance(prompt, str):
        return _unmeasured(work, sample, wanted, "skipped", prompt)
    missing = _cells(work, sample, wanted)
    key = draw_key(work.config.seed, spec_of(work.plan.task), sample.id)
    found = evaluate(lm, sample, prompt, missing, key, work.config.draft)
    rows = []
    for cell in missing:
        measured = found.cells[cell]
        if isinstance(measured, Failure):
            row = _read_row(work, cell, sample, prompt)
            rows.append(replace(row, status="failed", reason=measured.reason))
        else:
            rows.append(measured_row(work, cell, sample, prompt, measured, found.full))
    return rows


def measured_row(
    work: Workload, cell: Cell, sample: Sample, prompt: Prompt, measured: Measurement, full: Measurement
) -> Row:
    """The row of a cell that was evaluated; a failed one where the task cannot score the answer."""
    row = _read_row(work, cell, sample, prompt)
    try:
        return replace(row, **_measurements(work, cell, sample, measured, full))
    except PluginError as error:
        return replace(row, status="failed", reason=str(error))


def _read_row(work: Workload, cell: Cell, sample: Sample, prompt: Prompt) -> Row:
    seen = cell.policy.seen_text if cell.policy else None
    return replace(
        _blank(work, cell, sample),
        context_tokens=len(prompt.context),
        question_tokens=len(prompt.question),
        prompt_sha256=prompt.sha256,
        seen_share=seen.share(prompt.ids) if seen else None,
    )


def failed_rows(work: Workload, sample: Sample, wanted: Set[str], reason: str) -> list[Row]:
    """The wanted rows of a sample that could not be computed."""
    return _unmeasured(work, sample, wanted, "failed", reason)


def _unmeasured(work: Workload, sample: Sample, wanted: Set[str], status: str, reason: str) -> list[Row]:
    blanks = [_blank(work, cell, sample) for cell in _cells(work, sample, wanted)]
    return [replace(row, status=status, reason=reason) for row in blanks]


def _cells(work: Workload, sample: Sample, wanted: Set[str]) -> list[Cell]:
    return [cell for cell in work.plan.all_cells if work.key(cell, sample) in wanted]


def _blank(work: Workload, cell: Cell, sample: Sample) -> Row:
    """A row with what is known before anything is measured."""
    geometry, task = work.opened.geometry, work.plan.task
    return Row.of(
        work.configuration(cell),
        sample.id,
        family=work.family(cell),
        spec=cell.spec,
        task_spec=spec_of(task),
        data=work.samples.source,
        pins_mode="none" if cell.budget is None else work.plan.pins,
        cut_tokens=sample.cut,
        layers=geometry.layers,
        evicted_layers=0 if cell.budget is None else len(geometry.full_layers),
        note="; ".join(filter(None, _notes(work, cell, sample))),
        gold_label=guarded(task, f"to label sample {sample.id!r}", lambda: task.label(sample)),
    )


def _notes(work: Workload, cell: Cell, sample: Sample) -> list[str]:
    """What a reader of the row must know, beside its numbers."""
    notes = [sample.note]
    if work.samples.thought:
        notes.append(
            f"the chat template opens a thought ({work.samples.thought}): answer, choices and reference "
            "stand inside it; where the template can close it, --template-arg does (enable_thinking=false)"
        )
    if (sample.bare or not sample.context) and work.plan.question == "withheld":
        notes.append(NO_CONTEXT)
    if cell.budget is not None and 0 < cell.pins.total >= cell.budget:
        notes.append(f"budget {cell.budget} <= pins {cell.pins.total}: only pinned tokens are kept")
    return notes


def _measurements(
    work: Workload, cell: Cell, sample: Sample, measured: Measurement, full: Measurement
) -> dict[str, Any]:
    """The measured part of a row. Raises: PluginError for a task's scoring that fails, or is no number."""
    outcome, task = measured.outcome, work.plan.task
    metrics: dict[str, float] = guarded(
        task, f"to score sample {sample.id!r}", lambda: dict(task.score(sample, outcome.answer))
    )
    metrics |= {"nll": outcome.nll, "nll_tokens": outcome.nll_tokens, "kv_bytes": measured.kv_bytes}
    if cell.budget is not None:
        if sample.choices or sample.max_new_tokens:
            metrics["agreement"] = float(outcome.answer.label == full.outcome.answer.label)
        metrics["missed_mass"] = measured.missed_mass
        if outcome.kl is not None:
            metrics["kl"] = outcome.kl
        if measured.eviction_cost is not None:
            metrics["eviction_cost"] = measured.eviction_cost
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PluginError(
                f"task '{task.name}', sample {sample.id!r}: {name} is {value!r}; every metric must be a "
                "finite number"
            )
    chosen = outcome.answer.loglikelihoods and sample.choices[int(outcome.answer.label)].strip()
    return {
        "kept": measured.kept,
        "peak": measured.peak,
        "text": outcome.answer.text,
        "label": chosen or None,
        "metrics": metrics,
        "times": measured.times,
    }
