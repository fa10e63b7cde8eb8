"""Prompts, rows, statistics, learning, and what is refused."""

from __future__ import annotations

from .mutation import mutation

PROMPT, FILES = "kvbench/model/prompt.py", "kvbench/model/files.py"
PROMPTING = "kvbench/model/prompting.py"
STORE, ROWS, WORKLOAD = "kvbench/store/results.py", "kvbench/study/rows.py", "kvbench/study/workload.py"
RUNNER = "kvbench/study/runner.py"
INTERRUPT, VERIFY = "kvbench/study/interrupt.py", "kvbench/audit/verify.py"
METRICS, SIGNIFICANCE = "kvbench/contract/metrics.py", "kvbench/stats/significance.py"
JUDGEQ = "policies/judgeq/"
IDS = "laws/test_ids.py::test_one_tokenisation"
KILL = "laws/test_resume.py::test_kill"
NEW = "laws/test_resume.py::test_only_what_is_new"
LESSON = "judgeq/test_train.py::test_the_gradient_is_that_of_the_whole_sequence"

MUTATIONS = [
    mutation(
        "7", "a token that spans the border belongs to the context", PROMPT,
        "inside = (index for index, end in enumerate(ends) if end > rendered.border)",
        "inside = (index + 1 for index, end in enumerate(ends) if end > rendered.border)",
        "tasks/test_prompt.py::test_a_token_that_spans_the_border_belongs_to_the_question",
    ),
    mutation(
        "7", "context and question are tokenised apart", PROMPT,
        "    return Prompt(ids[:context], ids[context:length], choices, reference, context - border, chat)",
        "    apart = _tokenise(rendered.text[: rendered.border], tokenizer, rendered.special)[0]\n"
        "    ids = apart + _tokenise(rendered.text[rendered.border :], tokenizer, False)[0]\n"
        "    return Prompt(ids[: len(apart)], ids[len(apart) :], choices, reference)",
        IDS,
    ),
    mutation(
        "7", "positions begin at 1", "kvbench/engine/forward.py",
        "positions = torch.arange(start, start + new, device=lm.device)",
        "positions = torch.arange(start + 1, start + new + 1, device=lm.device)",
        IDS,
    ),
    mutation(
        "10", "rows are written when all is done (B55)", RUNNER,
        "        for index, rows in interrupt.between(found):",
        "        for index, rows in list(interrupt.between(found)):",
        KILL,
    ),
    mutation(
        "10", "a torn tail stays in the file", STORE,
        "            os.ftruncate(self._rows, whole)\n            os.fsync(self._rows)\n", "",
        "laws/test_resume.py::test_torn_anywhere",
    ),
    mutation(
        "10", "finished samples are computed again (B53)", WORKLOAD,
        "for cell in self.plan.all_cells) - done", "for cell in self.plan.all_cells) - set()",
        KILL,
    ),
    mutation(
        "10", "weights are read before it is known that they are needed (B56)", RUNNER,
        "    with Store.open(path, fixed, extra, config.as_dict(), config.fresh) as store:\n",
        "    opened.load()\n"
        "    with Store.open(path, fixed, extra, config.as_dict(), config.fresh) as store:\n",
        "laws/test_resume.py::test_a_finished_run_loads_nothing",
    ),
    mutation(
        "10", "the seed is not part of a row's key (B52)", WORKLOAD,
        '            "seed": self.config.seed,\n', '            "seed": 0,\n',
        NEW,
    ),
    mutation(
        "10", "a row may be overwritten by other content", STORE,
        'if known not in (None, entry) and known[0] != "failed":', "if False:",
        "store/test_results.py::test_same_row_is_ignored_another_one_refused",
    ),
    mutation(
        "attribution", "rows carry the name of another policy", ROWS,
        "        spec=cell.spec,\n",
        "        spec=work.plan.all_cells[-1].spec if cell.policy else cell.spec,\n",
        "laws/test_seeds.py::test_seeds_are_the_single_runs_together",
    ),
    mutation(
        "attribution", "agreement is that of an answer with itself", ROWS,
        "float(outcome.answer.label == full.outcome.answer.label)",
        "float(outcome.answer.label == outcome.answer.label)",
        "laws/test_resume.py::test_agreement_is_with_the_full_cache_of_the_same_sample",
    ),
    mutation(
        "statistics", "McNemar's test has one side", SIGNIFICANCE,
        "return min(1.0, 2 * tail / 2**n)", "return min(1.0, tail / 2**n)",
        "store/test_compare.py::test_b58_paired_on_the_same_samples",
    ),
    mutation(
        "statistics", "Holm's correction may fall", SIGNIFICANCE,
        "reached = max(reached, min(1.0, (len(p) - rank) * p[index]))",
        "reached = min(1.0, (len(p) - rank) * p[index])",
        "store/test_compare.py::test_holm_by_hand",
    ),
    mutation(
        "statistics", "the metric's direction is lost: a lower nll is worse", METRICS,
        '"negative log-likelihood of the reference continuation", "lower", POSITIVE),',
        '"negative log-likelihood of the reference continuation", limits=POSITIVE),',
        "store/test_compare.py::test_paired_with_the_full_cache_and_a_lower_is_better_metric",
    ),
    mutation(
        "statistics", "perplexity averages samples, not tokens (B50)", METRICS,
        'per token", "lower", (1.0, None), "ppl"),', 'per token", "lower", (1.0, None)),',
        "store/test_aggregate.py::test_means_by_hand",
    ),
    mutation(
        "statistics", "three seeds of a sample are three samples", "kvbench/stats/bootstrap.py",
        "starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]]) if len(ids) else np.empty(0, int)",
        "starts = np.arange(len(ids))",
        "store/test_compare.py::test_one_sample_under_three_seeds_is_one_sample",
    ),
    mutation(
        "statistics", "a policy is compared with the baseline at another budget", "kvbench/stats/compare.py",
        'else [*ROW_SETTING, "budget"]', "else [*ROW_SETTING]",
        "store/test_compare.py::test_b58_paired_on_the_same_samples",
    ),
    mutation(
        "statistics", "samples are paired by their order", "kvbench/stats/pairs.py",
        "keys = [key for key in mine if key in theirs]",
        "theirs = dict(zip(mine, theirs.values()))\n    keys = list(theirs)",
        "store/test_compare.py::test_b58_paired_on_the_same_samples",
    ),
    mutation(
        "identity", "an axis at its default is hashed (law 11)", "kvbench/contract/identity.py",
        "if axis.name in configuration and configuration[axis.name] != axis.default:",
        "if axis.name in configuration:",
        "laws/test_identity.py::test_at_its_default_nothing_is_computed_again",
    ),
    mutation(
        "statistics", "answers are resampled, so that 24 of 24 is certain", "kvbench/stats/aggregate.py",
        'self._kinds[name] = "rate" if counted else "mean"', 'self._kinds[name] = "mean"',
        "store/test_aggregate.py::test_the_interval_of_answers_is_wilsons",
    ),
    mutation(
        "statistics", "the bootstrap is corrected for bias the wrong way", "kvbench/stats/bootstrap.py",
        "shifted = [bias + z for z in (-Z, Z)]", "shifted = [z - bias for z in (-Z, Z)]",
        "store/test_aggregate.py::test_equal_estimates_are_resampled_once_and_bounds_are_bca",
    ),
    mutation(
        "statistics", "brackets are corrected for", "kvbench/stats/pairs.py",
        'correct(frame, SETTING, ~frame["policy"].isin(brackets_of(rows)))',
        'correct(frame, SETTING, frame["n"] > 0)',
        "store/test_compare.py::test_brackets_and_budgets_that_evict_nothing_are_not_corrected_for",
    ),
    mutation(
        "statistics", "cells that evict nothing are corrected for", "kvbench/stats/pairs.py",
        'lines[asked & (lines["n_fit"] < lines["n"])]', "lines[asked]",
        "store/test_compare.py::test_brackets_and_budgets_that_evict_nothing_are_not_corrected_for",
    ),
    mutation(
        "statistics", "resamples depend on the order of a cell's neighbours",
        "kvbench/stats/bootstrap.py",
        "    step = np.ldexp(1.0, exponent - 52)\n", "    step = np.ldexp(1.0, exponent - 80)\n",
        "store/test_aggregate.py::test_an_interval_has_the_same_bits_alone_and_in_company",
    ),
    mutation(
        "audit", "`verify` does not look at what was kept (B26)", VERIFY,
        '    "kept pairs are the budget, or the context where it is shorter": _kept,\n', "",
        "laws/test_verify.py::test_what_was_spoilt_is_named",
    ),
    mutation(
        "audit", "Ctrl-C gives up the sample in work", INTERRUPT,
        "        if interrupt.asked:\n            raise KeyboardInterrupt\n        interrupt.asked = True\n",
        "        raise KeyboardInterrupt\n",
        "faults/test_interrupt.py::test_an_interrupted_run",
    ),
    mutation(
        "models", "weights that a file lacks are made up", "kvbench/model/open.py",
        "        check_complete(folder, report)\n", "",
        "faults/test_models.py::test_a_damaged_folder_is_refused_with_its_name",
    ),
    mutation(
        "models", "code in a model folder may run", "kvbench/model/open.py",
        "config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)",
        "config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)",
        "faults/test_models.py::test_code_in_a_folder_is_never_run",
    ),
    mutation(
        "models", "the fingerprint does not read the weights", FILES,
        "            for index in range(SAMPLES):\n", "            for index in range(0):\n",
        "tasks/test_models.py::test_the_fingerprint_sees_weights_config_and_tokenizer",
    ),
    mutation(
        "models", "the end of answers is no part of what decides prompts", PROMPTING,
        '"eos": [tokenizer.eos_token_id, generation.get("eos_token_id")],', '"eos": [],',
        "tasks/test_prompting.py::test_what_decides_prompts_and_stops_is_part_of_the_model",
    ),
    mutation(
        "models", "a template prints today's date", PROMPTING,
        "tokenize=False, strftime_now=strftime_now, **options", "tokenize=False, **options",
        "tasks/test_prompting.py::test_the_date_of_a_template_does_not_follow_the_calendar",
    ),
    mutation(
        "7", "a reference after an answer prefix loses its space", "tasks/harness/offline.py",
        'prefix = self.doc_to_prefix(doc) or " "', 'prefix = " "',
        "tasks/test_harness.py::test_an_answer_prefix_is_followed_by_a_space",
    ),
    mutation(
        "learning", "nobody knows which text weights were trained on", "policies/kvp/command.py",
        "shape, card, traces.seen_text)", "shape, card)",
        "kvp/test_policy.py::test_training_on_what_is_tested_is_told",
    ),
    mutation(
        "learning", "runs of tokens are hashed by their sum", "kvbench/contract/seen_text.py",
        "powers = np.cumprod(np.full(RUN, odd))", "powers = np.full(RUN, odd)",
        "store/test_seen_text.py::test_small_ids_are_told_apart",
    ),
    mutation(
        "contract", "a wrapper forgets the pins of its base", "kvbench/contract/wrapper.py",
        "return self.inner.pins", "return Pins()",
        "contract/test_wrapper.py::test_what_it_reads_pins_and_fits_is_the_bases",
    ),
    mutation(
        "learning", "soft tokens learn from the response's last token only", JUDGEQ + "lesson.py",
        "lesson.wanted.append(rows[0, :, :, :n].mean(1))", "lesson.wanted.append(rows[0, :, -1, :n])",
        LESSON,
    ),
    mutation(
        "learning", "soft tokens are trained one position late", JUDGEQ + "lesson.py",
        "    start = lesson.length\n", "    start = lesson.length + 1\n",
        LESSON,
    ),
    mutation(
        "learning", "only the last soft token counts", JUDGEQ + "policy.py",
        "seen.probe_attention.mean(2)", "seen.probe_attention[:, :, -1]",
        "judgeq/test_policy.py::test_score_by_hand",
    ),
    mutation(
        "learning", "a resumed training forgets its curve", JUDGEQ + "train.py",
        "curve = Curve(**notes) if notes else Curve()", "curve = Curve()",
        "judgeq/test_train.py::test_an_interrupted_training_ends_alike",
    ),
]  # fmt: skip
