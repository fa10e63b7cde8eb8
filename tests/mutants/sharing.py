"""What rows, policies and schedules share: calls of score, time, hidden states, weights."""

from __future__ import annotations

from .mutation import mutation

RANKING, COMPRESS = "kvbench/engine/ranking.py", "kvbench/engine/compress.py"
STOPWATCH, PASSES = "kvbench/engine/stopwatch.py", "kvbench/engine/passes.py"

TOGETHER = "laws/test_batched_scores.py::test_together_as_alone"
CHARGED = "laws/test_timing.py::test_shared_work_is_charged_to_everyone"
SHOWN = "laws/test_hidden.py::test_hidden_states_are_what_attention_receives"
BOUND = "kvp/test_policy.py::test_bound_once_and_still_itself"

MUTATIONS = [
    mutation(
        "isolation", "a policy may write into the cache", "kvbench/engine/score.py",
        "if written := seen.written(before):", "if written := seen.written(seen.versions()) * 0:",
        "laws/test_isolation.py::test_a_failing_policy_is_named_and_alone",
    ),
    mutation(
        "isolation", "what a policy has written stays for the others", "kvbench/engine/evaluate.py",
        "            refused[error.policy] = str(error)",
        "            refused[error.policy] = str(error)\n            raise",
        "laws/test_isolation.py::test_a_failing_policy_is_named_and_alone",
    ),
    mutation(
        "6", "rows of one batch get each other's rankings", RANKING,
        "self._tracks[rows[index], ranker]", "self._tracks[rows[-1 - index], ranker]",
        TOGETHER,
    ),
    mutation(
        "6", "rows that are no neighbours are shown in another order", "kvbench/engine/observe.py",
        "return tensor[torch.tensor(rows)", "return tensor[torch.tensor(rows).flip(0)",
        "laws/test_batched_scores.py::test_rows_that_are_no_neighbours_and_few_at_once",
    ),
    mutation(
        "6", "cells of all schedules are compressed under the first cell's", "kvbench/engine/evaluate.py",
        "if cell.schedule == schedule)", "if True)",
        "laws/test_order.py::test_schedules_in_one_call",
    ),
    mutation(
        "8", "a row that fails takes its batch along", RANKING,
        "                for row in rows:  # a policy", "                for row in rows[:0]:  # a policy",
        "laws/test_batched_scores.py::test_a_row_that_fails_fails_alone",
    ),
    mutation(
        "time", "shared work is paid by whoever asks first", STOPWATCH,
        "        return laps", "        return []",
        CHARGED,
    ),
    mutation(
        "time", "scoring counts as prefill", PASSES,
        "- started - ranking.spent()\n    done", "- started\n    done",
        CHARGED,
    ),
    mutation(
        "time", "a cell pays for the rows of other budgets", COMPRESS,
        "seconds[cell] += found.seconds",
        "seconds[cell] += sum(one.seconds for one in rankings.found.values())",
        "laws/test_timing.py::test_a_cell_pays_for_its_own_rows",
    ),
    mutation(
        "hidden", "attention is known by the name of its class", "kvbench/model/hook.py",
        "    return census.modules",
        "    named = (one for one in model.modules() if hasattr(one, 'layer_idx'))\n"
        "    return {one.layer_idx: one for one in named if type(one).__name__.endswith('Attention')}",
        "laws/test_hidden.py::test_names_do_not_matter",
    ),
    mutation(
        "hidden", "a layer is shown what the first one received", "kvbench/engine/hidden.py",
        "        into.clear()\n        into[module.layer_idx] = hidden",
        "        into[module.layer_idx] = next(iter(into.values()), hidden)",
        SHOWN,
    ),
    mutation(
        "bind", "weights are bound again for every sample", "kvbench/model/lm.py",
        "        if name in self._bound:", "        if False:",
        "kvp/test_policy.py::test_retrained_weights_are_bound_again",
    ),
    mutation(
        "bind", "weights that were trained again are not seen", "kvbench/model/lm.py",
        "name = (policy, policy.identity)", 'name = (policy, "")',
        "kvp/test_policy.py::test_retrained_weights_are_bound_again",
    ),
    mutation(
        "bind", "a learned policy reads its file in every layer", "policies/kvp/policy.py",
        "fast_scores(self._agents[seen.full_index],", "fast_scores(load(self.weights)[0][seen.full_index],",
        BOUND,
    ),
]  # fmt: skip
