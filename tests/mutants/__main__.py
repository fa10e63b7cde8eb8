"""`make mutants`: break the code on purpose, one law at a time, and see whether a test notices.

    python -m tests.mutants                   # all; what was caught and has not changed is left out
    python -m tests.mutants --only drafts     # those whose law, words, file or tests have the text
    python -m tests.mutants --list            # the table, without running anything

Exits with 1 when a mutation survives, no longer applies, hangs, or was caught by a test that fails anyway.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .mutation import Mutation
from .run import CAUGHT, Outcome, case_name, failing_anyway, preload, run_all
from .table import MUTATIONS

ROOT = Path(__file__).parents[2]
KNOWN = ROOT / "build" / "mutants.json"  # state of a mutation -> the test cases that caught it


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of a law, of the words, of a file or a test")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument(
        "--again", action="store_true", help="also what was caught before and has not changed"
    )
    parser.add_argument("--list", action="store_true", help="only print the table")
    options = parser.parse_args(given)
    chosen = [one for one in MUTATIONS if options.only.lower() in repr(one).lower()]
    if options.list:
        print(table([(one, "") for one in chosen]))
        return 0
    stale = [(one, f"DOES NOT APPLY: {fault}") for one in chosen if (fault := one.fault(ROOT))]
    ready = [one for one in chosen if not one.fault(ROOT)]
    known = {} if options.again or not KNOWN.is_file() else json.loads(KNOWN.read_text())
    states = {one: one.state(ROOT) for one in ready}  # before anybody goes on editing
    outcomes = run([one for one in ready if states[one] not in known], options.jobs)
    remember({states[one]: found.failed for one, found in outcomes.items() if found.verdict == CAUGHT})
    lines = [(one, told(outcomes[one]) if one in outcomes else "caught before") for one in ready]
    print(table([*lines, *stale]))
    bad = len(stale) + sum(outcome.verdict != CAUGHT for outcome in outcomes.values())
    print(f"\n{len(chosen) - bad} of {len(chosen)} are caught")
    return int(bad > 0)


def run(todo: Sequence[Mutation], jobs: int) -> dict[Mutation, Outcome]:
    """Run them, then take back what was caught by a test case that fails without them."""
    outcomes: dict[Mutation, Outcome] = {}
    if not todo:
        return outcomes
    preload()
    for one, outcome in run_all(ROOT, todo, jobs):
        outcomes[one] = outcome
        told_now = f"{len(outcomes)}/{len(todo)} {outcome.verdict} in {outcome.seconds:.0f} s: {one.broken}"
        print(told_now, file=sys.stderr, flush=True)
    caught = {one: outcome for one, outcome in outcomes.items() if outcome.verdict == CAUGHT}
    anyway = failing_anyway(ROOT, [case for outcome in caught.values() for case in outcome.failed])
    for one, outcome in caught.items():
        if anyway & set(outcome.failed):
            outcomes[one] = Outcome("FAILS ANYWAY", outcome.failed, outcome.seconds)
    return outcomes


def remember(caught: dict[str, tuple[str, ...]]) -> None:
    KNOWN.parent.mkdir(exist_ok=True)
    before = json.loads(KNOWN.read_text()) if KNOWN.is_file() else {}
    KNOWN.write_text(json.dumps(before | caught, indent=1))


def told(outcome: Outcome) -> str:
    return f"{outcome.verdict} ({outcome.seconds:.0f} s)"


def table(lines: Sequence[tuple[Mutation, str]]) -> str:
    """Markdown: law, what is broken, the tests that must fail, and what happened."""
    head = ["| law | what is broken | what must catch it | |", "| --- | --- | --- | --- |"]
    for one, word in lines:
        tests = ", ".join(f"`{case_name(test)}`" for test in one.tests)
        head.append(f"| {one.law} | {one.broken} | {tests} | {word} |")
    return "\n".join(head)


if __name__ == "__main__":
    raise SystemExit(main())
