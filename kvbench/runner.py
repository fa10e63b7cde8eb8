"""`kvbench.run`: check everything, build the samples, evaluate what is missing, store every row.

Order matters: whatever can be refused is refused before the model's weights load, and a run whose
rows are all there never loads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from .aggregate import aggregate
from .config import FULL, Cell, RunConfig, fingerprint, parse_pins
from .errors import BadInput, KvbenchError, StoreError
from .policy import Pins, Policy
from .registry import POLICIES, TASKS, expand_policies, spec_of
from .results import Store, read_rows
from .task import Sample, Setting, Task

if TYPE_CHECKING:
    from .loop import Ranker
    from .models import LoadedModel, OpenModel
    from .prompt import Prompt


@dataclass(frozen=True)
class RunResult:
    """What a run gives back.

    rows: one line per (cell, sample). table: aggregates with intervals. path: the run folder.
    notes: what a reader of the numbers must know. failed: rows whose policy broke its contract.
    """

    rows: pd.DataFrame
    table: pd.DataFrame
    path: Path
    notes: list[str] = field(default_factory=list)
    failed: int = 0


@dataclass(frozen=True)
class _TaskPlan:
    """One task with the cells to evaluate. ranks: each cell's policy under its pins (full has none)."""

    task: Task
    question: str
    cells: dict[Cell, Ranker]
    specs: dict[Cell, str]
    full: Cell


def run(config: RunConfig, progress: bool = True) -> RunResult:
    """Evaluate every policy x budget of a configuration and return rows and aggregates.

    Rows already in the run folder are not computed again. Raises KvbenchError for anything that
    cannot be run, before the weights load.
    """
    policies = [POLICIES.parse(spec) for spec in expand_policies(config.policies)]
    tasks = [TASKS.parse(spec) for spec in config.tasks]
    path = _early_checks(config, tasks)
    from .models import open_model

    opened = open_model(config.model, config.device, config.dtype)
    plans = [_plan(config, task, policies) for task in tasks]
    work = [_Work.build(config, plan, opened) for plan in plans]
    fixed = {
        "model": opened.name, "model_sha256": opened.sha256, "model_revision": opened.revision,
        "dtype": str(opened.dtype).removeprefix("torch."), "device": opened.device.type,
    }  # fmt: skip
    extra = {"style": _style(policies), "tasks": {name: info for item in work for name, info in item.info}}
    with Store.open(path, fixed, extra) as store:
        notes = list(store.notes)
        missing = sum(len(item.missing(store.done)) for item in work)
        if missing:
            lm = opened.load()
            with _progress(progress, missing) as advance:
                for item in work:
                    for sample, prompt in item.missing(store.done):
                        store.append(item.rows(lm, sample, prompt, store.done))
                        advance(item.plan.task.name)
    return _result(path, work, notes)


def _early_checks(config: RunConfig, tasks: list[Task]) -> Path:
    """Refuse bad data, models and folders within seconds."""
    from .models import check_model

    if len({spec_of(task) for task in tasks}) < len(tasks):
        raise BadInput("the same task is given twice: keep one of them")
    for task in tasks:
        task.check(config.data)
    check_model(config.model)
    path = Path(config.out) if config.out else _default_folder(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StoreError(f"cannot write to {path} ({error.strerror}): choose a writable folder with --out") from error
    return path


def _default_folder(config: RunConfig) -> Path:
    """A folder that the same command finds again; more budgets, policies or samples go there too."""
    own = {key: value for key, value in config.as_dict().items() if key not in ("policies", "budgets", "limit", "out")}
    names = "-".join(spec.partition(":")[0].replace("/", "_") for spec in config.tasks)
    model = config.model.replace("/", "_").strip("._")
    return Path("results") / f"{names[:60]}-{model[-40:]}-{fingerprint(own)[:8]}"


def _plan(config: RunConfig, task: Task, policies: list[Policy]) -> _TaskPlan:
    """The cells of one task: every policy at every budget, under the task's or the user's protocol."""
    from .loop import Ranker

    schedule = config.schedule or ("chunked" if config.chunk else task.schedule)
    chunk = config.chunk or task.chunk
    if schedule == "chunked" and chunk is None:
        raise BadInput(f"--schedule chunked: task '{task.name}' has no chunk size of its own, add --chunk N")
    chunk = chunk if schedule == "chunked" else None
    asked = parse_pins(config.pins)
    cells, specs = {}, {}
    for policy in policies:
        pins = policy.pins if asked is None else asked
        params = tuple(asdict(policy).items())
        for budget in config.budgets:
            cell = Cell(policy.name, params, budget, pins, schedule, chunk)
            cells[cell] = Ranker(policy, pins)
            specs[cell] = spec_of(policy)
    full = Cell(FULL, (), None, Pins(), schedule, chunk)
    return _TaskPlan(task, config.question or task.question, cells, specs, full)


@dataclass(frozen=True)
class _Work:
    """One task's samples and the row keys they need."""

    config: RunConfig
    plan: _TaskPlan
    opened: OpenModel
    chat: bool
    source: str
    sha256: str
    items: list[tuple[Sample, Prompt | str]]

    @classmethod
    def build(cls, config: RunConfig, plan: _TaskPlan, opened: OpenModel) -> _Work:
        """Build and tokenise the samples; one that does not fit the model becomes a reason to skip it."""
        from .prompt import build_prompt, count_tokens, uses_chat

        tokenizer = opened.tokenizer
        chat = uses_chat(tokenizer, config.template)
        setting = Setting(
            config.seed, config.limit, config.data, chat, lambda sample: count_tokens(sample, tokenizer, chat)
        )
        made = plan.task.samples(setting)
        items: list[tuple[Sample, Prompt | str]] = []
        for sample in made.samples[: config.limit]:
            prompt = build_prompt(sample, tokenizer, plan.question, chat)  # type: ignore[arg-type]
            longest = max(len(prompt.reference.ids), sample.max_new_tokens, *(len(c.ids) for c in prompt.choices), 0)
            total = len(prompt.context) + len(prompt.question) + longest
            fits = total <= opened.geometry.max_length
            reason = f"prompt and answer take {total} tokens, the model reads {opened.geometry.max_length}"
            items.append((sample, prompt if fits else reason))
        ids = [sample.id for sample, _ in items]
        if len(set(ids)) < len(ids):
            raise BadInput(f"task '{plan.task.name}' gives two samples the same id: ids must be unique")
        return cls(config, plan, opened, chat, made.source, made.sha256, items)

    @property
    def info(self) -> list[tuple[str, dict[str, Any]]]:
        """The task's part of the manifest."""
        task = self.plan.task
        facts = {"metric": task.metric, "source": task.source, "data": self.source, "data_sha256": self.sha256}
        return [(spec_of(task), facts)]

    @property
    def all_cells(self) -> list[Cell]:
        return [self.plan.full, *self.plan.cells]

    def missing(self, done: set[str]) -> list[tuple[Sample, Prompt | str]]:
        """Samples with at least one cell to compute."""
        return [
            (sample, prompt) for sample, prompt in self.items
            if any(self.key(cell, sample) not in done for cell in self.all_cells)
        ]  # fmt: skip

    def configuration(self, cell: Cell) -> dict[str, Any]:
        """Everything that changes a cell's numbers, except the sample."""
        task = self.plan.task
        return {
            **cell.as_dict(),
            "task": task.name,
            "task_params": _params(task),
            "data_sha256": self.sha256,
            "model": self.opened.name,
            "model_sha256": self.opened.sha256,
            "dtype": str(self.opened.dtype),
            "question": self.plan.question,
            "template": "chat" if self.chat else "none",
            "seed": self.config.seed,
        }

    def key(self, cell: Cell, sample: Sample) -> str:
        return fingerprint([fingerprint(self.configuration(cell)), sample.id])

    def keys(self) -> set[str]:
        return {self.key(cell, sample) for sample, _ in self.items for cell in self.all_cells}

    def rows(self, lm: LoadedModel, sample: Sample, prompt: Prompt | str, done: set[str]) -> list[dict[str, Any]]:
        """Evaluate the sample's missing cells and describe them as rows."""
        from .evaluate import Failure, evaluate
        from .observe import draw_key

        missing = [cell for cell in self.all_cells if self.key(cell, sample) not in done]
        if isinstance(prompt, str):
            return [self._row(cell, sample) | {"status": "skipped", "reason": prompt} for cell in missing]
        wanted = {cell: ranker for cell, ranker in self.plan.cells.items() if cell in set(missing)}
        key = draw_key(self.config.seed, spec_of(self.plan.task), sample.id)
        done_now = evaluate(lm, sample, prompt, wanted, key)
        found = {self.plan.full: done_now.full, **done_now.cells}
        rows = []
        for cell in missing:
            row = self._row(cell, sample)
            measured = found[cell]
            if isinstance(measured, Failure):
                rows.append(row | {"status": "failed", "reason": measured.reason})
                continue
            row |= {"context_tokens": len(prompt.context), "question_tokens": len(prompt.question)}
            rows.append(row | self._measured(cell, sample, measured, done_now.full))
        return rows

    def _row(self, cell: Cell, sample: Sample) -> dict[str, Any]:
        """The part of a row that is known before anything is measured."""
        geometry = self.opened.geometry
        settings = self.configuration(cell)
        for name in ("data_sha256", "model_sha256", "dtype"):
            settings.pop(name)  # in the manifest; the row's config hash covers them
        pinned = cell.budget is not None and cell.pins.total and cell.budget <= cell.pins.total
        note = f"budget {cell.budget} <= pins {cell.pins.total}: only pinned tokens are kept" if pinned else ""
        return {
            "key": self.key(cell, sample),
            "config": fingerprint(self.configuration(cell)),
            **settings,
            "spec": self.plan.specs.get(cell, FULL),
            "task_spec": spec_of(self.plan.task),
            "pins_mode": self.config.pins if cell.budget is not None else "none",
            "sample": sample.id,
            "context_tokens": None,
            "question_tokens": None,
            "kept": None,
            "layers": geometry.layers,
            "evicted_layers": len(geometry.full_layers) if cell.budget is not None else 0,
            "status": "ok",
            "reason": "",
            "note": note,
            "text": "",
            "gold_label": self.plan.task.label(sample),
            "label": None,
            "metrics": {},
            "times": {},
        }

    def _measured(self, cell: Cell, sample: Sample, measured: Any, full: Any) -> dict[str, Any]:
        """The measured part of a row."""
        outcome = measured.outcome
        metrics = dict(self.plan.task.score(sample, outcome.answer))
        metrics |= {"nll": outcome.nll, "nll_tokens": outcome.nll_tokens, "kv_bytes": measured.kv_bytes}
        if cell.budget is not None:
            metrics["agreement"] = float(outcome.answer.label == full.outcome.answer.label)
            metrics["missed_mass"] = measured.missed_mass
            if outcome.kl is not None:
                metrics["kl"] = outcome.kl
            if measured.eviction_cost is not None:
                metrics["eviction_cost"] = measured.eviction_cost
        label = None
        if outcome.answer.loglikelihoods:
            label = sample.choices[int(outcome.answer.label)].strip()
        return {
            "kept": measured.kept,
            "peak": measured.peak,
            "text": outcome.answer.text,
            "label": label,
            "metrics": metrics,
            "times": measured.times,
        }


def _params(instance: Any) -> dict[str, Any]:
    return asdict(instance) if is_dataclass(instance) and not isinstance(instance, type) else {}


def _style(policies: list[Policy]) -> dict[str, dict[str, Any]]:
    """How each policy is drawn, so that plotting needs no policy code."""
    return {
        spec_of(policy): {
            "color": policy.color,
            "dashed": any(need.is_attention for need in policy.needs),
            "bracket": policy.bracket,
            "source": policy.source,
        }
        for policy in policies
    }


@contextmanager
def _progress(shown: bool, total: int) -> Iterator[Any]:
    """A bar with rate and time left on stderr; silent where nobody watches."""
    if not shown:
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:.2f} samples/s" if task.speed else "")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        handle = bar.add_task("samples", total=total)
        yield lambda name: bar.update(handle, advance=1, description=name)


def _result(path: Path, work: list[_Work], notes: list[str]) -> RunResult:
    """Rows and aggregates of this configuration; other rows of the folder stay out."""
    rows = read_rows(path)
    rows = rows[rows["key"].isin(set().union(*(item.keys() for item in work)))].reset_index(drop=True)
    failed = rows[rows["status"] == "failed"]
    for spec, reason in sorted(set(zip(failed["spec"], failed["reason"], strict=True))):
        notes.append(f"{spec}: {int((failed['spec'] == spec).sum())} rows failed: {reason}")
    for item in work:
        lm = item.opened
        if len(lm.geometry.full_layers) < lm.geometry.layers:
            notes.append(
                f"{lm.name}: {lm.geometry.layers - len(lm.geometry.full_layers)} of {lm.geometry.layers} layers "
                "have a sliding window and are never evicted; budgets apply to the others"
            )
            break
    return RunResult(rows, aggregate(rows), path, notes, len(failed))


__all__ = ["KvbenchError", "RunResult", "run"]
