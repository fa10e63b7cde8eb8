"""Scores, rankings, and which tokens stay."""

from __future__ import annotations

from .mutation import mutation

ORDER, SELECTION = "kvbench/engine/order.py", "kvbench/engine/selection.py"
COMPRESS, CELL = "kvbench/engine/compress.py", "kvbench/contract/cell.py"
RANKING, SCORE, OBSERVE = "kvbench/engine/ranking.py", "kvbench/engine/score.py", "kvbench/engine/observe.py"
MEASURE, PASSES, PROBE = "kvbench/engine/measure.py", "kvbench/engine/passes.py", "kvbench/engine/probe.py"
DRAWS, SEEN = "kvbench/contract/draws.py", "kvbench/contract/observation.py"
SUMS, EVICTION = "kvbench/contract/attention_sums.py", "kvbench/contract/eviction.py"
EVALUATE, FUTURE = "kvbench/engine/evaluate.py", "kvbench/engine/future.py"
SECOND = "kvbench/engine/second_pass.py"
GEOMETRY, CHECK = "kvbench/model/geometry.py", "kvbench/audit/check.py"

MASKED = "laws/test_evicted_is_masked.py::test_reference_continuation"
KEPT = "laws/test_budgets.py::test_kept_is_the_budget"
HEAD = "laws/test_budgets.py::test_what_stays_is_the_head_of_the_ranking"
ALONE = "laws/test_isolation.py::test_a_failing_policy_is_named_and_alone"
MISSED = "laws/test_observe.py::test_missed_mass"
CHECKED = "contract/test_check.py::test_a_broken_law_is_found_with_its_smallest_layer"

MUTATIONS = [
    mutation(
        "3", "budgets are rounded to multiples of 4 (B10)", SELECTION,
        "    return keep(order, cell.held(order.shape[-1]))",
        "    return keep(order, max(4, cell.held(order.shape[-1]) // 4 * 4))",
        KEPT,
    ),
    mutation(
        "3", "every chunk has a budget of its own (B07)", SELECTION,
        "    return keep(order, cell.held(order.shape[-1]))",
        "    slots = order.shape[-1]\n"
        "    return keep(order, cell.held(slots) + slots - min(slots, cell.schedule.chunk or slots))",
        KEPT,
    ),
    mutation(
        "3", "everything stays, whatever the budget", CELL,
        "return tokens if self.budget is None else min(self.budget, tokens)", "return tokens",
        KEPT,
    ),
    mutation(
        "3", "bytes of the keys only", MEASURE,
        "for tensor in bucket.view(layer)[:2]]", "for tensor in bucket.view(layer)[:1]]",
        "laws/test_budgets.py::test_bytes_are_the_formula",
    ),
    mutation(
        "3", "the window is counted in slots, not in positions", ORDER,
        "is_window = (positions >= seen - pins.last) & ~is_sink",
        "is_window = (positions >= slots - pins.last) & ~is_sink",
        "laws/test_budgets.py::test_what_stays_is_the_head_of_the_ranking",
    ),
    mutation(
        "3", "the pinned window begins one token early", ORDER,
        "is_window = (positions >= seen - pins.last) & ~is_sink",
        "is_window = (positions >= seen - pins.last - 1) & ~is_sink",
        HEAD,
    ),
    mutation(
        "3", "pins are ranked like any token", ORDER,
        "    if pins.total == 0 or slots == 0:\n", "    if True:\n",
        HEAD, "contract/test_policies.py::test_kept_sets_are_nested_and_hold_the_pins",
    ),
    mutation(
        "3", "the newest tokens stay, whatever was scored", ORDER,
        "    order = slots - 1 - newest_first\n",
        "    order = (slots - 1 - torch.arange(slots, device=score.device)).expand_as(newest_first)\n",
        "golden/test_kept.py::test_kept_positions_have_not_changed",
    ),
    mutation(
        "3", "sliding layers are evicted, too", GEOMETRY,
        'full = tuple(index for index, kind in enumerate(types) if kind == "full_attention")',
        "full = tuple(range(layers))",
        "laws/test_full_budget.py::test_sliding_layers_keep_everything",
    ),
    mutation(
        "4", "odd budgets drop the best token", SELECTION,
        "    return keep(order, cell.held(order.shape[-1]))",
        "    held = cell.held(order.shape[-1])\n"
        "    return keep(order.roll(-(held % 2), -1), held)",
        "laws/test_nested.py::test_all_budgets_nest",
    ),
    mutation(
        "4", "what a policy is shown depends on the number of cells", EVALUATE,
        "moment = Moment(n, n, key, None, ", "moment = Moment(n, n, key + len(cells), None, ",
        "laws/test_order.py::test_one_cell_or_all",
    ),
    mutation(
        "5", "chunks of 32 tokens at most", COMPRESS,
        "self._chunks = ids.split(chunk)", "self._chunks = ids.split(min(chunk, 32))",
        "laws/test_chunks.py::test_one_chunk_is_after_prefill",
    ),
    mutation(
        "5", "a chunk reads the uncompressed past (B06)", COMPRESS,
        "        cache, rows = evict(lm, cache, list(row_of), list(row_of.values()), rankings, behind)\n",
        "        whole = cache\n"
        "        cache, rows = evict(lm, cache, list(row_of), list(row_of.values()), rankings, behind)\n"
        "        if rest:\n"
        "            cache, rows = whole, [0] * len(rows)\n",
        "laws/test_chunks.py::test_several_chunks_are_not",
    ),
    mutation(
        "6", "window attention is shared by windows of different length", SEEN,
        'return self._once(("window", window), lambda:', 'return self._once("window", lambda:',
        "laws/test_order.py::test_one_cell_or_all",
    ),
    mutation(
        "6", "kept sets of other rows share a row", SELECTION,
        "names[i] = (rows[i], *name)", "names[i] = tuple(name)",
        "laws/test_shared_rows.py::test_equal_slots_of_different_rows",
    ),
    mutation(
        "6", "kept sets of other KV heads share a row", SELECTION,
        "numbers = torch.arange(order.numel(), device=order.device).view(order.shape)",
        "numbers = torch.arange(order.shape[-1], device=order.device).expand_as(order)",
        "laws/test_shared_rows.py::test_what_looks_alike",
    ),
    mutation(
        "6", "all policies share the first one's ranking", SELECTION,
        "    order = rankings.found[row, cell.ranker].order\n",
        "    order = next(iter(rankings.found.values())).order\n",
        HEAD,
    ),
    mutation(
        "6", "rows of one bucket read the queries of another (B33)", OBSERVE,
        "    queries = _take(layer.queries, inside)\n",
        "    queries = _take(layer.queries.roll(1, 0), inside)\n",
        "laws/test_order.py::test_one_cell_or_all",
    ),
    mutation(
        "8", "a failing policy ends the run", RANKING,
        "                self._fail(policy, rows[0], reason(policy, error))\n            return False\n",
        "                raise\n            return False\n",
        ALONE,
    ),
    mutation(
        "8", "a refusal by one policy stops the run", RANKING,
        "from ..errors import KvbenchError\n", "from ..errors import PluginError as KvbenchError\n",
        "faults/test_crash.py::test_any_error_of_a_policy_fails_its_own_rows_only",
    ),
    mutation(
        "8", "a failing policy takes another one with it", RANKING,
        "        for ranker in self._rankers[row][policy]:\n            self._failures[row, ranker] = why",
        "        for ranker in [one for mine in self._rankers[row].values() for one in mine]:\n"
        "            self._failures[row, ranker] = why",
        ALONE,
    ),
    mutation(
        "8", "the reason does not name the policy", SCORE,
        "raise PluginError(f\"policy '{name}', layer {seen.layer}: {fault}\")", "raise PluginError(fault)",
        ALONE,
    ),
    mutation(
        "8", "a score with NaN is not refused", SCORE,
        "return score, score.sum((1, 2), dtype=torch.float64).isfinite()",
        "return score, torch.ones_like(score[:, 0, 0], dtype=torch.bool)",
        ALONE, "contract/test_check.py::test_a_bad_score_stops_with_the_policys_name",
    ),
    mutation(
        "8", "of two faults the last layer's is told", RANKING,
        "for layer, policy, rows, _ in reversed(self._finite):  # the first layer has the last word",
        "known = known[::-1]\n            for layer, policy, rows, _ in self._finite:",
        "laws/test_shared_rows.py::test_the_first_fault_is_told",
    ),
    mutation(
        "9", "ties go to the older token (B27)", ORDER,
        "    newest_first = torch.sort(score.flip(-1), dim=-1, descending=True, stable=True).indices\n"
        "    order = slots - 1 - newest_first\n",
        "    order = torch.sort(score, dim=-1, descending=True, stable=True).indices\n",
        "laws/test_determinism.py::test_ties_go_to_the_newer_token", HEAD,
    ),
    mutation(
        "9", "KV heads share a draw", DRAWS,
        "heads = torch.arange(positions.shape[1], device=positions.device)[None, :, None]",
        "heads = torch.zeros(positions.shape[1], dtype=torch.int64, device=positions.device)[None, :, None]",
        "laws/test_determinism.py::test_kept_at_random",
    ),
    mutation(
        "9", "layers share a draw", SEEN,
        "uniform_at(draw_key(self._draw, self.layer), self.positions)",
        "uniform_at(draw_key(self._draw, 0), self.positions)",
        "laws/test_determinism.py::test_kept_at_random",
    ),
    mutation(
        "9", "a draw belongs to the slot, not to the token", SEEN,
        "uniform_at(draw_key(self._draw, self.layer), self.positions)",
        "uniform_at(\n            draw_key(self._draw, self.layer),\n"
        "            torch.arange(self.slots).expand_as(self.positions),\n        )",
        "laws/test_determinism.py::test_a_token_keeps_its_draw",
    ),
    mutation(
        "9", "keys of draws come from Python's salted hash", DRAWS,
        'return int.from_bytes(digest[:8], "little", signed=True)', "return hash(repr(parts))",
        "laws/test_resume.py::test_kill",
    ),
    mutation(
        "observations", "a query's attention includes the next key (B36)", SUMS,
        "slot > query[:, None]", "slot > query[:, None] + 1",
        "laws/test_observe.py::test_attention_rows",
    ),
    mutation(
        "observations", "the group's maximum is taken over the wrong heads", SUMS,
        "rows = rows.view(rows.shape[0], kv_heads, -1, rows.shape[2], slots).amax(2)",
        "rows = rows.view(rows.shape[0], -1, kv_heads, rows.shape[2], slots).amax(1)",
        "laws/test_observe.py::test_streamed_sums", MISSED,
    ),
    mutation(
        "observations", "the future begins one token late", FUTURE,
        '        u = streamed_sums(queries, keys, layer.scaling, offset, "max")',
        '        late = int(offset == self._context)\n'
        '        u = streamed_sums(queries[:, :, late:], keys, layer.scaling, offset + late, "max")',
        MISSED,
    ),
    mutation(
        "metrics", "eviction cost counts ranks from 0", EVICTION,
        "rank = torch.arange(1, utility.shape[-1] + 1,", "rank = torch.arange(0, utility.shape[-1],",
        "laws/test_observe.py::test_eviction_cost_is_the_area_of_missed_mass",
    ),
    mutation(
        "metrics", "missed mass counts what was kept", EVICTION,
        "torch.where(total > 0, 1 - hit / total, 0.0)", "torch.where(total > 0, hit / total, 0.0)",
        MISSED,
    ),
    mutation(
        "extra tokens", "they stay in the cache", PROBE,
        "    cache.rewind(mark)\n", "    cache.rewind(mark, 1)\n",
        "laws/test_probe.py::test_the_cache_is_bit_for_bit_as_without_them",
    ),
    mutation(
        "extra tokens", "they begin one position early", PROBE,
        "positions = torch.arange(start, start + len(part), device=tokens.device)",
        "positions = torch.arange(start - 1, start - 1 + len(part), device=tokens.device)",
        "laws/test_probe.py::test_their_attention_is_the_plain_models",
    ),
    mutation(
        "extra tokens", "their columns are left out of the softmax", SEEN,
        "return attention_rows(self._probe.queries, keys, self.scaling, self.slots)[..., : self.slots]",
        "return attention_rows(self._probe.queries, self._all_keys, self.scaling, self.slots)",
        "laws/test_probe.py::test_their_attention_is_the_plain_models",
    ),
    mutation(
        "extra tokens", "after a chunk, their rankings go to other rows", RANKING,
        "(rows[row], ranker): replace(one,", "(rows[-1 - row], ranker): replace(one,",
        "laws/test_probe.py::test_other_policies_do_not_notice",
    ),
    mutation(
        "extra tokens", "reading them costs nothing", RANKING,
        "seconds=one.seconds + seconds,", "seconds=one.seconds,",
        "laws/test_probe.py::test_equal_tokens_are_read_once",
    ),
    mutation(
        "extra tokens", "the peak leaves them out", COMPRESS,
        "count_slots(lm, cache, row) + found.read_after)", "count_slots(lm, cache, row))",
        "laws/test_probe.py::test_chunks_read_them_again_after_kept_and_new_tokens",
    ),
    mutation(
        "second pass", "slots are taken for positions after an eviction", SECOND,
        "plain = slots == self._seen", "plain = True",
        "rankings/test_second_pass.py::test_after_an_eviction",
    ),
    mutation(
        "second pass", "a later block does not see the text before it", SECOND,
        "first = len(columns) + read + start", "first = len(columns) + start",
        "rankings/test_second_pass.py::test_blocks_change_nothing",
    ),
    mutation(
        "second pass", "a text stays in the cache", "kvbench/engine/probe.py",
        "    cache.rewind(mark)\n", "",
        "rankings/test_second_pass.py::test_kvzip_in_one_piece",
    ),
    mutation(
        "second pass", "the last reading overwrites the others", SECOND,
        "        if known is not None:", "        if known is None:",
        "rankings/test_second_pass.py::test_kvzip_in_pieces",
    ),
    mutation(
        "speed", "the host waits for each score", RANKING,
        "        self._finite.append((seen.layer, policy, rows, finite))\n",
        "        finite.all().item()\n        self._finite.append((seen.layer, policy, rows, finite))\n",
        "laws/test_no_sync.py::test_waits_do_not_grow",
    ),
    mutation(
        "check", "scores are not compared with garbage in what is not declared", CHECK,
        "            if not torch.equal(other, score):\n", "            if False:\n",
        CHECKED, "contract/test_check.py::test_the_few_layers_that_every_policy_is_tried_on_find_it_too",
    ),
    mutation(
        "check", "a second instance of a policy is not tried", CHECK,
        "for each in (policy, policy, twin)]", "for each in (policy, policy)]",
        "contract/test_check.py::test_weights_drawn_when_a_policy_is_made_are_found",
    ),
    mutation(
        "check", "what was written into shared work goes unseen", CHECK,
        "        if isinstance(copy, Tensor) and not torch.equal(copy, shared[name])\n",
        "        if False\n",
        CHECKED,
    ),
]  # fmt: skip
