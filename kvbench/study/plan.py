"""What a run will compute: cells, samples and the keys of their rows, known before weights load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..contract.cell import Cell, Schedule
from ..contract.need import Need
from ..contract.pins import Pins, parse_pins
from ..contract.policy import Policy, TrainedFor
from ..contract.registry import spec_of
from ..contract.task import Task
from ..errors import BadInput
from .config import PROTOCOLS, RunConfig

if TYPE_CHECKING:
    from ..model.open import OpenModel


@dataclass(frozen=True)
class TaskPlan:
    """One task with the cells to evaluate.

    question, pins: as resolved from the options, the protocol and the task. cells: those with a policy. full:
    the cell without eviction, which is always evaluated.
    """

    task: Task
    question: str
    pins: str
    cells: tuple[Cell, ...]
    full: Cell

    @property
    def all_cells(self) -> list[Cell]:
        return [self.full, *self.cells]


def plan_task(config: RunConfig, task: Task, policies: list[Policy]) -> TaskPlan:
    """The cells of one task: every policy at every budget.

    An option goes before the protocol, the protocol before the task's own rules.

    Raises BadInput for a chunked schedule without a chunk size.
    """
    question, mode, schedule = _rules(config, task)
    given = parse_pins(mode)
    cells = (
        Cell(policy, budget, policy.pins if given is None else given, schedule)
        for policy in policies
        for budget in config.budgets
    )
    full = Cell(None, None, Pins(), schedule)
    return TaskPlan(task, question, mode, tuple(dict.fromkeys(cells)), full)


def _rules(config: RunConfig, task: Task) -> tuple[str, str, Schedule]:
    """Question, pins and schedule as `plan_task` resolves them."""
    protocol = PROTOCOLS[config.protocol]
    own_schedule, own_chunk = task.loop()
    kind = config.schedule or ("chunked" if config.chunk else own_schedule)
    chunk = (config.chunk or own_chunk) if kind == "chunked" else None
    if kind == "chunked" and chunk is None:
        raise BadInput(f"--schedule chunked: task '{task.name}' has no chunk size of its own, add --chunk N")
    schedule = Schedule(kind, chunk)
    question = config.question or protocol.question or task.question
    mode = config.pins or protocol.pins or task.pins
    return question, mode, schedule


def check_rules(config: RunConfig, task: Task, policy: Policy) -> None:
    """Refuse a policy that ranks by the question where it would not see it, and one that cannot rank after
    an eviction where it would have to. Raises BadInput."""
    question, _, schedule = _rules(config, task)
    if schedule.chunk is not None and not policy.chunked:
        raise BadInput(
            f"{spec_of(policy)} cannot rank tokens of earlier chunks, and {spec_of(task)} is read in chunks "
            f"of {schedule.chunk}: use --schedule prefill"
        )
    if Need.QUESTION in policy.needs and (question != "seen" or schedule.chunk is not None):
        name = spec_of(task)
        why = f"{name} withholds" if question != "seen" else f"{name} gives with the last chunk only"
        raise BadInput(
            f"{spec_of(policy)} ranks tokens by the question, which {why}: use --question seen and "
            "--schedule prefill"
        )


def check_data(data: str | None, tasks: list[Task]) -> None:
    """Refuse bad or missing data, and a file that no task would read. Raises BadInput."""
    if data is not None and not any(task.takes_data for task in tasks):
        raise BadInput(f"--data {data}: {', '.join(task.name for task in tasks)} read no data; leave it out")
    for task in tasks:
        task.check(data)


def check_fits(policy: Policy, opened: OpenModel, force: bool = False) -> None:
    """Refuse learned weights on a model that they were not trained for.

    force: a model of the same shape will do. Raises BadInput with the commands that would train them.
    """
    if not (force and forced_from(policy, opened)):
        check_trained(policy, opened.name, _trained_for(opened), can_force=True)


def forced_from(policy: Policy | None, opened: OpenModel) -> str:
    """The fingerprint of the model that weights were trained for, where it is another one of the same
    shape; "" where there is nothing to force."""
    trained = policy.trained_for if policy else None
    here = _trained_for(opened)
    if trained is None or trained == here or replace(trained, sha256=here.sha256) != here:
        return ""
    return trained.sha256


def _trained_for(opened: OpenModel) -> TrainedFor:
    geometry = opened.geometry
    shape = (len(geometry.full_layers), geometry.kv_heads, geometry.head_dim)
    return TrainedFor(*shape, opened.sha256)


def check_trained(policy: Policy, name: str, model: TrainedFor, can_force: bool = False) -> None:
    """`check_fits` for a model that is known by its name, sizes and fingerprint only."""
    trained = policy.trained_for
    if trained is None or trained == model:
        return
    asked = (model.layers, model.kv_heads, model.head_dim)
    fitting = (trained.layers, trained.kv_heads, trained.head_dim)
    advice = ""
    if can_force and asked == fitting:
        advice = (
            "If it is the same model in another file (from the hub, dequantised), --force-weights takes them "
            "and marks every row. "
        )
    reason = f"have another fingerprint than {name}" if asked == fitting else (
        f"are for (layers, KV heads, head size) {fitting}, {name} has {asked}"
    )  # fmt: skip
    raise BadInput(
        f"the weights of {spec_of(policy)} {reason}. {advice}Train some for it, with a seed and a text "
        f"that no evaluation uses: kvbench trace --model {name} "
        "--task ruler/niah_single_2:haystack=docstrings,"
        "ruler/niah_multikey_1:haystack=docstrings,ruler/niah_multikey_2 --seed 1000 --length 350-700 "
        f"--samples 128 --out traces, then kvbench train --policy {policy.name} --traces traces "
        f"--out {policy.name}.safetensors, then --policy {policy.name}:weights={policy.name}.safetensors"
    )
