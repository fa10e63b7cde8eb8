"""`kvbench trace`: run a model over samples and store what every layer computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..contract.cell import Cell
from ..contract.identity import fingerprint
from ..contract.registry import POLICIES, TASKS, expand_tasks, spec_of
from ..errors import BadInput, StoreError, WorkersLost
from ..model.open import LoadedModel, OpenModel
from ..model.prompt import Prompt
from ..study.executors import Executor, Local, LostJob, in_order
from ..study.interrupt import deferred_interrupt
from ..study.plan import check_data, check_fits
from ..study.progress import progress as progress_bar
from ..study.samples import SampleOptions, prepare
from .record import Recording, answer_prompt, record
from .trace import TraceInfo, TraceSet, TraceWriter, draft_of

STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TraceConfig:
    """What to record.

    tasks: specs, sampled in turn. samples: traces in all. length: tokens of every sample ("512"), or a
    range ("350-700") from which the samples of each task, all different, take evenly spaced lengths. under:
    "POLICY:BUDGET" records the queries of question and answer as they come out when the context was
    evicted to that budget first; keys and values of the context are always the full cache's. response:
    what follows the question, the data's reference or what the model itself answers (generated). store:
    dtype on disk. hidden: also what every attention module receives.
    """

    tasks: tuple[str, ...]
    samples: int
    out: str
    model: str = "smollm2-135m"
    length: str | None = None
    seed: int = 0
    data: str | None = None
    under: str | None = None
    response: str = "data"
    store: str = "float16"
    hidden: bool = False
    device: str = "auto"
    dtype: str = "auto"
    template_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise BadInput(f"--samples {self.samples}: record 1 trace or more")
        if self.store not in STORED:
            raise BadInput(f"--store '{self.store}': choose one of {', '.join(STORED)}")
        if self.response not in ("data", "generated"):
            raise BadInput(f"--response '{self.response}': choose data or generated")

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Shortest and longest sample, or None for each task's own length."""
        if self.length is None:
            return None
        low, dash, high = self.length.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or int(high or low) < int(low):
            raise BadInput(f"--length '{self.length}': write tokens as 512, or a range as 350-700")
        return int(low), int(high or low)

    @property
    def eviction(self) -> Cell | None:
        """The cell of `under`: a policy and its budget."""
        if self.under is None:
            return None
        name, _, budget = self.under.rpartition(":")
        if not name or not budget.isdigit() or int(budget) < 1:
            raise BadInput(f"--under '{self.under}': write POLICY:BUDGET as in kvp:128")
        policy = POLICIES.parse(name)
        return Cell(policy, int(budget), policy.pins)


@dataclass(frozen=True)
class TraceRequest:
    """One trace to record. name: its id. task: where the prompt comes from."""

    name: str
    task: str
    prompt: Prompt

    @property
    def draft(self) -> str:
        """Equal for the same sample at another length."""
        return draft_of(self.task, self.name)


def collect(
    config: TraceConfig,
    progress: bool = True,
    announce: Callable[[str], None] = lambda text: None,
    executor: Executor | None = None,
) -> TraceSet:
    """Record traces; the same command resumes. announce: is told the size before anything is written.

    executor: who computes; None is this process. Traces are stored in the same order whoever does.
    Raises KvbenchError for anything that cannot be recorded, before the weights load where possible.
    """
    eviction, _ = config.eviction, config.lengths
    with executor or Local() as executor:
        if eviction is not None:
            executor.check("policy", [eviction.name])
        opened = executor.open(config.model, config.device, config.dtype)
        if eviction is not None:
            check_fits(eviction.ranker.policy, opened)
        items = _samples(config, opened)
        writer = TraceWriter(config.out, _header(config, opened))
        known = {info.id for info in writer.done}
        missing = [item for item in items if item.name not in known]
        announce(_check_disk(config, opened, missing))
        if missing:
            with progress_bar(progress, len(missing), "traces") as advance:
                _compute(config, missing, opened, executor, writer, advance)
    return TraceSet(config.out)


def _compute(
    config: TraceConfig,
    missing: list[TraceRequest],
    opened: OpenModel,
    executor: Executor,
    writer: TraceWriter,
    advance: Callable[[str], None],
) -> None:
    """Record and store; what workers lost is named at the end, when the rest is stored."""
    work = partial(_record_request, config)
    lost = []
    with deferred_interrupt() as interrupt:
        results = zip(missing, in_order(executor.compute(opened.load, work, missing)), strict=True)
        try:
            for request, found in interrupt.between(results):
                if isinstance(found, LostJob):
                    lost.append(f"{request.name}: {found.reason}")
                    continue
                layers, scaling, ids = found
                info = TraceInfo(
                    request.name, len(ids), len(request.prompt.context), request.task, scaling, ids=ids
                )
                writer.add(info, layers)
                advance(request.task)
        except KeyboardInterrupt:
            writer.flush()
            raise
    writer.flush()
    if lost:
        raise WorkersLost(
            f"{len(lost)} traces could not be recorded, the others are stored; run the same command again. "
            f"First: {lost[0]}"
        )


def _record_request(config: TraceConfig, lm: LoadedModel, request: TraceRequest) -> Recording:
    prompt = answer_prompt(lm, request.prompt) if config.response == "generated" else request.prompt
    return record(lm, prompt, STORED[config.store], config.eviction, request.name, config.hidden)


def _samples(config: TraceConfig, opened: OpenModel) -> list[TraceRequest]:
    """Every sample, the tasks taking turns."""
    specs = expand_tasks(config.tasks)
    check_data(config.data, [TASKS.parse(spec) for spec in specs])
    per_task = -(-config.samples // len(specs))
    columns = [_column(config, opened, spec, per_task) for spec in specs]
    there = sum(map(len, columns))
    if there < config.samples:
        raise BadInput(f"--samples {config.samples}: {', '.join(config.tasks)} have only {there} samples")
    turns = [column[i] for i in range(max(map(len, columns))) for column in columns if i < len(column)]
    if len({request.name for request in turns}) < len(turns):
        raise BadInput(f"{', '.join(config.tasks)} give the same sample twice: name each task once")
    return turns[: config.samples]


def _column(config: TraceConfig, opened: OpenModel, spec: str, count: int) -> list[TraceRequest]:
    """`count` samples of one task. With a range of lengths, up to 8 evenly spaced ones take turns.

    Every sample is another draft: the same text at two lengths would be one sample counted twice.
    """
    if config.lengths is None:
        return _prompts(config, opened, spec, count)
    low, high = config.lengths
    steps = min(8, count, high - low + 1)
    lengths = [low + (high - low) * i // max(1, steps - 1) for i in range(steps)]
    sized = [_prompts(config, opened, _with_length(spec, length), count) for length in lengths]
    used: set[str] = set()
    turns: list[TraceRequest] = []
    for i in range(count):
        fresh = (request for request in sized[i % steps] if request.draft not in used)
        request = next(fresh, None)
        if request is not None:
            used.add(request.draft)
            turns.append(request)
    return turns


def _with_length(spec: str, length: int) -> str:
    return f"{spec}{',' if ':' in spec else ':'}length={length}"


def _prompts(config: TraceConfig, opened: OpenModel, spec: str, count: int) -> list[TraceRequest]:
    task = TASKS.parse(spec)
    options = SampleOptions(
        "withheld",  # a trace's boundary is where the question begins, whatever the task shows
        limit=count, seed=config.seed, data=config.data, template_args=config.template_args,
    )  # fmt: skip
    found = []
    for sample, prompt in prepare(task, opened, options).items:
        if isinstance(prompt, str):
            raise BadInput(f"sample '{sample.id}' of {spec}: {prompt}; use shorter samples")
        ids = fingerprint([prompt.context, prompt.question, prompt.reference.ids])[:8]  # other data, other id
        found.append(TraceRequest(f"{spec_of(task)}|{sample.id}|{ids}", task.name, prompt))
    return found


def _length(prompt: Prompt) -> int:
    return len(prompt.context) + len(prompt.question) + len(prompt.reference.ids)


def _header(config: TraceConfig, opened: OpenModel) -> dict[str, Any]:
    geometry = opened.geometry
    given: dict[str, Any] = {"template_args": list(config.template_args)} if config.template_args else {}
    given |= {"hidden": True} if config.hidden else {}
    return {
        **given,
        "model": opened.name,
        "model_sha256": opened.sha256,
        "layers": len(geometry.full_layers),
        "query_heads": geometry.query_heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "dtype": config.store,
        "model_dtype": str(opened.dtype).removeprefix("torch."),
        "tasks": list(config.tasks),
        "length": config.length,
        "seed": config.seed,
        "data": Path(config.data).name if config.data else None,
        "under": config.under,
        "response": None if config.response == "data" else config.response,
        "under_weights": config.eviction.ranker.policy.identity if config.eviction else "",
    }


def _check_disk(config: TraceConfig, opened: OpenModel, missing: list[TraceRequest]) -> str:
    """What will be written, in words. Raises StoreError for what the disk cannot hold."""
    geometry = opened.geometry
    itemsize = STORED[config.store].itemsize
    heads = geometry.query_heads + 2 * geometry.kv_heads
    tokens = sum(_length(request.prompt) for request in missing)
    width = heads * geometry.head_dim + (
        opened.config.get_text_config(decoder=True).hidden_size if config.hidden else 0
    )
    size = len(geometry.full_layers) * width * itemsize * tokens
    free = shutil.disk_usage(_existing(Path(config.out))).free
    told = f"{len(missing)} traces, {tokens} tokens, {size / 2**30:.2f} GiB; {free / 2**30:.1f} GiB free"
    if size > free * 0.95:
        raise StoreError(f"{told} in {config.out}: record fewer or shorter samples, or choose another --out")
    return told


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
