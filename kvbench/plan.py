"""What a run will compute: cells, samples and the keys of their rows, known before weights load."""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .config import FULL, PROTOCOLS, Cell, RunConfig, fingerprint, parse_pins
from .errors import BadInput
from .policy import Pins, Policy, TrainedFor
from .registry import spec_of
from .task import Sample, Setting, Task, guarded

if TYPE_CHECKING:
    from .loop import Ranker
    from .models import OpenModel
    from .prompt import Prompt


@dataclass(frozen=True)
class TaskPlan:
    """One task with the cells to evaluate.

    question, pins: as resolved from the options, the protocol and the task. cells: each cell with its
    policy under its pins. specs: each cell's policy as written. full: the cell without eviction, which
    is always evaluated.
    """

    task: Task
    question: str
    pins: str
    cells: dict[Cell, Ranker]
    specs: dict[Cell, str]
    full: Cell

    @property
    def all_cells(self) -> list[Cell]:
        return [self.full, *self.cells]


def plan_task(config: RunConfig, task: Task, policies: list[Policy]) -> TaskPlan:
    """The cells of one task: every policy at every budget.

    An option goes before the protocol, the protocol before the task's own rules.

    Raises BadInput for a chunked schedule without a chunk size.
    """
    from .loop import Ranker

    protocol = PROTOCOLS[config.protocol]
    own_schedule, own_chunk = task.loop()
    schedule = config.schedule or ("chunked" if config.chunk else own_schedule)
    chunk = (config.chunk or own_chunk) if schedule == "chunked" else None
    if schedule == "chunked" and chunk is None:
        raise BadInput(f"--schedule chunked: task '{task.name}' has no chunk size of its own, add --chunk N")
    question = config.question or protocol.question or task.question
    mode = config.pins or protocol.pins or task.pins
    asked = parse_pins(mode)
    cells, specs = {}, {}
    for policy in policies:
        pins = policy.pins if asked is None else asked
        params = tuple(asdict(policy).items())
        for budget in config.budgets:
            cell = Cell(policy.name, params, budget, pins, schedule, chunk)
            cells[cell] = Ranker(policy, pins)
            specs[cell] = spec_of(policy)
    full = Cell(FULL, (), None, Pins(), schedule, chunk)
    return TaskPlan(task, question, mode, cells, specs, full)


def check_data(data: str | None, tasks: list[Task]) -> None:
    """Refuse bad or missing data, and a file that no task would read. Raises BadInput."""
    if data is not None and not any(task.takes_data for task in tasks):
        raise BadInput(f"--data {data}: {', '.join(task.name for task in tasks)} read no data; leave it out")
    for task in tasks:
        task.check(data)


def check_fits(policy: Policy, opened: OpenModel) -> None:
    """Refuse learned weights on a model that they were not trained for.

    Raises BadInput with the commands that would train them.
    """
    geometry = opened.geometry
    shape = (len(geometry.full_layers), geometry.kv_heads, geometry.head_dim)
    check_trained(policy, opened.name, TrainedFor(*shape, opened.sha256))


def check_trained(policy: Policy, name: str, model: TrainedFor) -> None:
    """`check_fits` for a model that is known by its name, sizes and fingerprint only."""
    trained = policy.trained_for
    if trained is None or trained == model:
        return
    asked = (model.layers, model.kv_heads, model.head_dim)
    fitting = (trained.layers, trained.kv_heads, trained.head_dim)
    reason = f"have another fingerprint than {name}" if asked == fitting else (
        f"are for (layers, KV heads, head size) {fitting}, {name} has {asked}"
    )  # fmt: skip
    raise BadInput(
        f"the weights of {spec_of(policy)} {reason}. Train some for it: kvbench trace --model {name} "
        f"--task needle,ruler/niah_single_2,ruler/niah_multikey_2,ruler/vt --length 350-700 --samples 96 "
        f"--out traces, then kvbench train --policy {policy.name} --traces traces "
        f"--out {policy.name}.safetensors, then --policy {policy.name}:weights={policy.name}.safetensors"
    )


@dataclass(frozen=True)
class Work:
    """One task's samples, tokenised, and the row keys they need.

    chat: whether the chat template is applied. source, sha256, seeded: of the data. metric: the main one.
    items: each sample with its prompt, or with the reason why it is skipped.
    """

    config: RunConfig
    plan: TaskPlan
    opened: OpenModel
    chat: bool
    source: str
    sha256: str
    seeded: bool
    metric: str
    items: list[tuple[Sample, Prompt | str]]

    @classmethod
    def build(cls, config: RunConfig, plan: TaskPlan, opened: OpenModel) -> Work:
        """Build and tokenise the samples; one that does not fit the model becomes a reason to skip it."""
        from .prompt import build_prompt, count_tokens, render_turns, token_ends, uses_chat

        tokenizer = opened.tokenizer
        if config.template == "chat" and plan.task.template == "none":
            raise BadInput(f"--template chat: task '{plan.task.name}' is running text, without a user's turn")
        chat = uses_chat(tokenizer, config.template) and plan.task.template != "none"
        setting = Setting(
            seed=config.seed,
            limit=config.limit,
            data=config.data,
            chat=chat,
            count=lambda sample: count_tokens(sample, tokenizer, chat),
            render=lambda turns, answer=False: render_turns(turns, tokenizer, chat, answer),
            ends=lambda text: token_ends(text, tokenizer),
        )
        made = guarded(plan.task, "to make its samples", lambda: plan.task.samples(setting))
        items: list[tuple[Sample, Prompt | str]] = []
        for sample in made.samples[: config.limit]:
            prompt = guarded(
                plan.task,
                f"to give sample {sample.id!r} a prompt",
                partial(build_prompt, sample, tokenizer, plan.question, chat),  # type: ignore[arg-type]
            )
            total = len(prompt.context) + prompt.room(sample.max_new_tokens)
            reason = f"prompt and answer take {total} tokens, the model reads {opened.geometry.max_length}"
            reason += f"; {plan.task.too_long}" if plan.task.too_long else ""
            items.append((sample, prompt if total <= opened.geometry.max_length else reason))
        ids = [sample.id for sample, _ in items]
        if len(set(ids)) < len(ids):
            raise BadInput(f"task '{plan.task.name}' gives two samples the same id: ids must be unique")
        metric = made.metric or plan.task.metric
        return cls(config, plan, opened, chat, made.source, made.sha256, made.seeded, metric, items)

    @property
    def info(self) -> dict[str, Any]:
        """The task's part of the manifest."""
        task = self.plan.task
        return {
            "metric": self.metric,
            "source": task.source,
            "data": self.source,
            "data_sha256": self.sha256,
        }

    @property
    def data(self) -> dict[str, Any]:
        """What the manifest says about the data with this hash."""
        seed = self.config.seed if self.seeded else None
        return {"task": spec_of(self.plan.task), "seed": seed, "source": self.source}

    def missing(self, done: set[str]) -> list[tuple[Sample, Prompt | str, frozenset[str]]]:
        """Samples with at least one row to compute, and the keys of those rows."""
        found = []
        for sample, prompt in self.items:
            wanted = frozenset(self.key(cell, sample) for cell in self.plan.all_cells) - done
            if wanted:
                found.append((sample, prompt, wanted))
        return found

    def configuration(self, cell: Cell) -> dict[str, Any]:
        """Everything that changes a cell's numbers, except the sample."""
        task = self.plan.task
        ranker = self.plan.cells.get(cell)
        return {
            **cell.as_dict(),
            "weights": ranker.policy.identity if ranker else "",
            "task": task.name,
            "task_params": parameters_of(task),
            "data_sha256": self.sha256,
            "model": self.opened.name,
            "model_sha256": self.opened.sha256,
            "dtype": str(self.opened.dtype),
            "question": self.plan.question,
            "template": "chat" if self.chat else "none",
            "seed": self.config.seed,
        }

    def family(self, cell: Cell) -> str:
        """The identity of a configuration apart from its seed: rows of one family are pooled."""
        settings = self.configuration(cell)
        for name in ("seed", "data_sha256") if self.seeded else ("seed",):
            settings.pop(name)
        return fingerprint(settings)

    def key(self, cell: Cell, sample: Sample) -> str:
        """The identity of a row: its configuration and its sample."""
        return fingerprint([fingerprint(self.configuration(cell)), sample.id])

    def keys(self) -> set[str]:
        return {self.key(cell, sample) for sample, _ in self.items for cell in self.plan.all_cells}


def parameters_of(instance: Any) -> dict[str, Any]:
    """The parameters of a policy or task, defaults included."""
    return asdict(instance) if is_dataclass(instance) and not isinstance(instance, type) else {}
