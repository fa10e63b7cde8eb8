"""Attention, the cache, and what the answer reads."""

from __future__ import annotations

from .mutation import mutation

ATTENTION, CACHE = "kvbench/engine/attention.py", "kvbench/engine/cache.py"
EVALUATE, FORWARD = "kvbench/engine/evaluate.py", "kvbench/engine/forward.py"
ANSWER, WRITE, TREE = "kvbench/engine/answer.py", "kvbench/engine/write.py", "kvbench/engine/tree.py"
HOOK = "kvbench/model/hook.py"

MASKED = "laws/test_evicted_is_masked.py::test_reference_continuation"
EVERY_LOGIT = "laws/test_full_budget.py::test_every_logit"
ENDING = "laws/test_answers.py::test_rows_that_end_do_not_change_the_others"
DRAFT = "laws/test_drafts.py::test_a_draft_changes_nothing"
CHOICES = "laws/test_answers.py::test_choices_without_a_common_token"
POSITIONS = "laws/test_answers.py::test_positions_count_the_whole_context"

MUTATIONS = [
    mutation(
        "1", "a query sees one token of its future", ATTENTION,
        "return every.tril(old)", "return every.tril(old + 1)",
        "laws/test_full_budget.py::test_chunk_remainders",
    ),
    mutation(
        "1", "a sliding window is one token too wide", ATTENTION,
        "inside = (slot <= query) & (slot > query - window)",
        "inside = (slot <= query) & (slot >= query - window)",
        EVERY_LOGIT, "laws/test_full_budget.py::test_chunk_remainders",
    ),
    mutation(
        "1", "the model's own scale on logits is lost where K/V are cached", ATTENTION,
        "out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)",
        "out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask)",
        "laws/test_full_budget.py::test_a_scale_of_its_own",
    ),
    mutation(
        "1", "a branch of the answer sees its siblings", TREE,
        "                seen[node] = seen[parent]", "                seen[node] = seen[node - 1]",
        DRAFT,
    ),
    mutation(
        "2", "query heads are folded to the wrong KV head", ATTENTION,
        "folded = query.reshape(batch, keys.shape[1], group * new, dim)",
        "folded = query.roll(1, 1).reshape(batch, keys.shape[1], group * new, dim)",
        MASKED,
    ),
    mutation(
        "2", "keys are gathered, values are not", CACHE,
        "                    target[part] = found.view(slots.shape + origin.shape[3:])",
        "                    if origin is not source.whole(layer)[1]:\n"
        "                        target[part] = found.view(slots.shape + origin.shape[3:])",
        MASKED,
    ),
    mutation(
        "2", "a chunk does not see the first kept slot (B08)", ATTENTION,
        "            return every.tril(old)\n",
        "            every[:, : min(1, old)] = False\n            return every.tril(old)\n",
        MASKED,
    ),
    mutation(
        "2", "positions of the question count the cache (B01)", ANSWER,
        "positions = torch.tensor(tree.depth, device=lm.device) + context",
        "positions = torch.tensor(tree.depth, device=lm.device) + cache.buckets[0].filled[0]",
        POSITIONS,
    ),
    mutation(
        "2", "all KV heads gather the slots of head 0", CACHE,
        "heads = row[:, None, None] * len(head) + head[None, :, None]",
        "heads = row[:, None, None] * len(head) + 0 * head[None, :, None]",
        "laws/test_budgets.py::test_what_stays_is_the_head_of_the_ranking",
    ),
    mutation(
        "2", "queries see one cached key too few (B31)", ATTENTION,
        "        every[:, old + new - self.visible.shape[1] :] = ",
        "        every[:, :1] = False\n        every[:, old + new - self.visible.shape[1] :] = ",
        MASKED,
    ),
    mutation(
        "2", "the reference is scored without its last token", ANSWER,
        "scored.append(list(zip(nodes, part.ids, strict=False)))",
        "scored.append(list(zip(nodes, (*part.ids[:-1], part.ids[0]), strict=False)))",
        MASKED,
    ),
    mutation(
        "5", "reading a cache touches the slots behind its end", ATTENTION,
        "        keys, values, positions = bucket.view(layer)\n"
        "        batch, heads, new, dim = query.shape\n"
        "        group = heads // keys.shape[1]\n"
        "        if window",
        "        keys, values, positions = bucket.view(layer)\n"
        "        values = values + 0 * bucket.whole(layer)[1].sum()\n"
        "        batch, heads, new, dim = query.shape\n"
        "        group = heads // keys.shape[1]\n"
        "        if window",
        "laws/test_chunks.py::test_evicted_data_has_no_effect",
    ),
    mutation(
        "6", "rows of a compacted cache are given out in the wrong order", CACHE,
        "place[order[stop]] = stop", "place[order[stop]] = len(order) - 1 - stop",
        "laws/test_answers.py::test_every_row_finds_its_place",
    ),
    mutation(
        "8", "stock sdpa is replaced for every model", HOOK,
        '    AttentionInterface.register(NAME, attend)',
        '    AttentionInterface.register(NAME, attend)\n    AttentionInterface.register("sdpa", attend)',
        "laws/test_isolation.py::test_other_models_are_untouched",
    ),
    mutation(
        "8", "a run seeds torch's generator", EVALUATE,
        "    request = AnswerRequest(lm, prompt, sample, draft)\n",
        "    torch.manual_seed(key & 0xFFFF)\n    request = AnswerRequest(lm, prompt, sample, draft)\n",
        "laws/test_isolation.py::test_other_models_are_untouched",
    ),
    mutation(
        "answers", "growing loses the newest slot", CACHE,
        "target[:, :, :length] = source", "target[:, :, : length - 1] = source[:, :, : length - 1]",
        "laws/test_answers.py::test_growing_beyond_the_room",
    ),
    mutation(
        "answers", "rewinding forgets the question", CACHE,
        "bucket.filled = [length + tokens for length in filled]",
        "bucket.filled = list(filled)",
        ENDING,
    ),
    mutation(
        "answers", "the reference stays in the cache while the answer is written (B15)", ANSWER,
        "    cache.rewind(mark)\n    lines: list[Line] = []\n", "    lines: list[Line] = []\n",
        MASKED,
    ),
    mutation(
        "answers", "an answer leaves the cache longer (B15)", ANSWER,
        "        lines = write(request.lm, cache, request.sample, known, request.draft)\n"
        "        cache.rewind(mark)\n",
        "        lines = write(request.lm, cache, request.sample, known, request.draft)\n"
        "        cache.rewind(mark, 1)\n",
        POSITIONS,
    ),
    mutation(
        "answers", "rows that leave take a neighbour's values", CACHE,
        "            derived.keys[layer], derived.values[layer] = part(keys), part(values)",
        "            derived.keys[layer], derived.values[layer] = part(keys), part(values.roll(1, 0))",
        ENDING,
    ),
    mutation(
        "answers", "ended rows never leave", WRITE,
        "if not stay or 2 * len(stay) > len(self.lines):", "if True:",
        ENDING,
    ),
    mutation(
        "answers", "an EOS as first token is written", WRITE,
        "    line.check(lm, sample, 0)\n", "",
        ENDING,
    ),
    mutation(
        "answers", "stop strings stay in the answer", WRITE,
        "            text = text.split(stop, 1)[0]", "            text = text.split(stop, 1)[0] + stop",
        "laws/test_answers.py::test_stop_strings",
    ),
    mutation(
        "answers", "answers are written one position late", WRITE,
        "self.tokens[index, step, None], position + step)",
        "self.tokens[index, step, None], position + step + 1)",
        "laws/test_evicted_is_masked.py::test_generated_text",
    ),
    mutation(
        "answers", "outcomes go to the rows in reverse", ANSWER,
        "in zip(answers, numbers, strict=True):", "in zip(answers, numbers[::-1], strict=True):",
        MASKED,
    ),
    mutation(
        "drafts", "a row takes over a draft that it does not agree with", WRITE,
        "        line.tokens.append(predicted[node - tree.root])",
        "        line.tokens.append(next(iter(tree.children[node]), predicted[node - tree.root]))",
        DRAFT,
    ),
    mutation(
        "drafts", "what a row took over stays where it was read", WRITE,
        "        self.cache.move([line.path for line in self.lines], question)\n", "",
        DRAFT,
    ),
    mutation(
        "drafts", "positions count the tree, not the branch", TREE,
        "self.depth.append(self.depth[node] + 1)", "self.depth.append(after)",
        DRAFT,
    ),
    mutation(
        "drafts", "a row joins one token late", WRITE,
        "            step = max(step, min(waiting))", "            step = max(step, min(waiting) + 1)",
        DRAFT,
    ),
    mutation(
        "drafts", "an EOS inside a draft goes unseen", WRITE,
        "        line.check(lm, sample, len(line.tokens) - 1)",
        "        line.check(lm, sample, len(line.tokens))",
        DRAFT,
    ),
    mutation(
        "drafts", "what comes after an end stays, when the host looks seldom", WRITE,
        "                del self.tokens[index + 1 :]\n", "",
        "laws/test_drafts.py::test_looking_seldom",
    ),
    mutation(
        "metrics", "nll is a sum, not a mean", ANSWER,
        "nll = -found.tokens[0][:, -scored:].mean(1)", "nll = -found.tokens[0][:, -scored:].sum(1)",
        MASKED,
    ),
    mutation(
        "metrics", "kl goes from the evicted cache to the full one", ANSWER,
        "return (full - logprobs[:, : full.shape[0]]).mul_(full.exp()).sum(-1)",
        "other = logprobs[:, : full.shape[0]]\n    return (other - full).mul_(other.exp()).sum(-1)",
        MASKED,
    ),
]  # fmt: skip
