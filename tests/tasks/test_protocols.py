"""Rules of a run: an option goes before the protocol, the protocol before the task's own."""

from __future__ import annotations

import pytest

from kvbench.contract.cell import PREFILL, Schedule
from kvbench.contract.pins import Pins
from kvbench.contract.registry import POLICIES, TASKS
from kvbench.errors import BadInput
from kvbench.study.config import RunConfig
from kvbench.study.plan import TaskPlan, plan_task


def plan(task: str, **options: object) -> TaskPlan:
    config = RunConfig(("snapkv", "knorm"), (task,), (64,), **options)  # type: ignore[arg-type]
    return plan_task(config, TASKS.parse(task), [POLICIES.parse(name) for name in config.policies])


def pins_of(planned: TaskPlan) -> dict[str, Pins]:
    return {cell.name: cell.pins for cell in planned.cells}


@pytest.mark.parametrize(
    ("task", "question"),
    [("boolq", "withheld"), ("needle", "withheld"), ("ruler/vt", "seen"), ("ppl/text", "withheld")],
)
def test_paper_leaves_the_rules_to_task_and_policy(task: str, question: str) -> None:
    planned = plan(task)
    assert (planned.question, planned.pins) == (question, "native")
    assert pins_of(planned) == {"snapkv": Pins(0, 32), "knorm": Pins(0, 0)}


def test_controlled_is_the_same_for_everyone() -> None:
    planned = plan("ruler/vt", protocol="controlled")
    assert (planned.question, planned.pins) == ("withheld", "4,16")
    assert set(pins_of(planned).values()) == {Pins(4, 16)}


def test_an_option_goes_before_the_protocol() -> None:
    planned = plan("ruler/vt", protocol="controlled", pins="none", question="seen", chunk=32)
    assert (planned.question, planned.pins) == ("seen", "none")
    assert set(pins_of(planned).values()) == {Pins(0, 0)}
    assert {cell.schedule for cell in planned.all_cells} == {Schedule("chunked", 32)}


def test_very_long_prompts_are_read_in_chunks() -> None:
    loops = {length: TASKS.parse(f"ruler/vt:length={length}").loop() for length in (4096, 131072)}
    assert loops == {4096: ("prefill", None), 131072: ("chunked", 4096)}
    assert {cell.schedule.chunk for cell in plan("ruler/vt:length=131072").all_cells} == {4096}
    at_once = plan("ruler/vt:length=131072", schedule="prefill")
    assert {cell.schedule for cell in at_once.all_cells} == {PREFILL}


def test_the_same_rules_make_the_same_rows() -> None:
    """How a rule was asked for is not part of a cell."""
    spelled = plan("ruler/vt", pins="4,16", question="withheld")
    assert spelled.cells == plan("ruler/vt", protocol="controlled").cells


def test_what_cannot_be_asked() -> None:
    with pytest.raises(BadInput, match=r"--protocol 'fair': choose one of paper, controlled"):
        plan("needle", protocol="fair")
    with pytest.raises(BadInput, match=r"budget 10 < pins 4 \+ 16 = 20"):
        RunConfig(("knorm",), ("needle",), (10,), protocol="controlled")
