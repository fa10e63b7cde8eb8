"""Which tests the fast half leaves out: `make fast`, or `pytest -m "not slow"`.

Left out is what takes seconds and rarely fails alone: the real model, workers of a Ray, browsers, processes
that import everything anew, drawn figures, random inputs by the dozen, and the laws on other architectures
than Llama. conftest.py marks them from here; `slow` may also stand on a test, as any marker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCH = "llama"  # on which the fast half tries the laws

# Files, or tests by the beginning of their name.
SLOW = (
    "tests/cli/test_commands.py::test_compare_prints_a_paired_table",
    "tests/cli/test_fuzz.py",
    "tests/cli/test_imports.py",
    "tests/cli/test_plugin.py",
    "tests/contract/test_tasks.py::test_samples",
    "tests/faults/test_crash.py::test_a_disk_that_fills_up",
    "tests/faults/test_interrupt.py::test_an_interrupted_run",
    "tests/faults/test_kinds.py::test_b58_a_failing_check",
    "tests/faults/test_soak.py",
    "tests/faults/test_untrusted.py",
    "tests/figures",
    "tests/judgeq/test_command.py",
    "tests/judgeq/test_train.py",
    "tests/kvp/test_eviction_error.py",
    "tests/kvp/test_train.py",
    "tests/laws/test_answers.py",
    "tests/laws/test_determinism.py::test_the_same_command_twice",
    "tests/laws/test_drafts.py",
    "tests/laws/test_ids.py",
    "tests/laws/test_isolation.py::test_other_models_are_untouched",
    "tests/laws/test_isolation.py::test_rows_of_a_failing_policy",
    "tests/laws/test_learned.py",
    "tests/laws/test_no_sync.py",
    "tests/laws/test_random.py",
    "tests/laws/test_resume.py",
    "tests/laws/test_verify.py",
    "tests/mutants/test_mutants.py::test_the_verdict",
    "tests/parity/test_kvpress.py",
    "tests/parity/test_kvpress_observations.py",
    "tests/parity/test_kvpress_second_pass.py",
    "tests/report",
    "tests/scale",
    "tests/store/test_compare.py",
    "tests/store/test_plot.py",
    "tests/store/test_reference.py::test_rows_manifest_and_figures",
    "tests/store/test_reference_rows.py",
    "tests/tasks/test_boolq.py::test_packaged_rows_equal_lm_eval",
    "tests/tasks/test_harness.py",
    "tests/tasks/test_lm_eval_equality.py",
    "tests/tasks/test_ppl.py",
    "tests/tasks/test_ruler.py",
)


def mark_slow(items: list[pytest.Item]) -> None:
    for item in items:
        name = f"{item.path.relative_to(ROOT).as_posix()}::{item.name}"
        of_the_laws = name.startswith("tests/laws/")
        arch = item.callspec.params.get("arch", ARCH) if hasattr(item, "callspec") else ARCH
        if (
            name.startswith(SLOW)
            or (of_the_laws and arch != ARCH)
            or item.get_closest_marker("model") is not None
        ):
            item.add_marker(pytest.mark.slow)
