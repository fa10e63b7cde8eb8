"""At full budget every lm-eval task gives lm-eval's own numbers, sample by sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.models import LoadedModel
from kvbench.registry import TASKS
from tests.tasks.lm_eval_runner import measured, official, ours, shared, theirs
from tests.tiny import tiny_loaded, tiny_model

CASES = {
    "boolq": ("super_glue/boolq/default.yaml", "super_glue_boolq_validation.jsonl"),
    "arc_challenge": ("arc/arc_challenge.yaml", "ai2_arc_challenge_validation.jsonl"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "hellaswag_validation.jsonl"),
    "mmlu:subject=anatomy": ("mmlu/default/mmlu_anatomy.yaml", "mmlu_test.jsonl"),
    "mmlu:subject=anatomy,shots=5": ("mmlu/default/mmlu_anatomy.yaml", "mmlu_test.jsonl"),
}
NAMES = {"accuracy": "acc,none", "acc_norm": "acc_norm,none"}


def read(path: str, subject: str | None = None) -> list[dict[str, Any]]:
    with Path(path).open(encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return [row for row in rows if subject is None or row["subject"] == subject]


def compare(lm: LoadedModel, plain: Any, spec: str, limit: int, chat: bool = False) -> None:
    file, name = CASES[spec]
    path = shared(name)
    subject = "anatomy" if "mmlu" in spec else None
    shots, examples = 0, None
    if "shots=5" in spec:
        shots, examples = 5, read(shared("mmlu_dev.jsonl"), subject)
        spec += f",dev={shared('mmlu_dev.jsonl')}"
    task = TASKS.parse(spec)
    samples = ours(lm, task, path, limit, chat).samples
    logged, results = theirs(lm, plain, official(file, read(path, subject)[:limit], shots, examples), chat)
    scores = []
    for sample, log in zip(samples, logged, strict=True):
        assert [request["arg_1"] for request in _requests(log)] == list(sample.choices)
        assert sample.context + sample.question == _requests(log)[0]["arg_0"]
        found = [log_likelihood for log_likelihood, _ in log["filtered_resps"]]
        greedy = [hit for _, hit in log["filtered_resps"]]
        for cell in measured(lm, sample, chat):
            answer = cell.outcome.answer
            if chat:  # lm-eval scores the template's last line break with every choice
                shift = found[0] - answer.loglikelihoods[0]
                assert shift <= 1e-4
                found = [one - shift for one in found]
            else:
                assert list(answer.greedy) == greedy
            assert answer.loglikelihoods == pytest.approx(found, abs=1e-4)
            score = task.score(sample, answer)
            if chat:
                assert score["accuracy"] == log["acc"]
            else:
                assert score == {mine: log[NAMES[mine].split(",")[0]] for mine in score}
        scores.append(score)
    for mine in scores[0]:
        if not chat or mine == "accuracy":
            mean = sum(score[mine] for score in scores) / len(scores)
            assert mean == pytest.approx(results[NAMES[mine]])


def _requests(log: dict[str, Any]) -> list[dict[str, Any]]:
    return list(log["arguments"].values()) if isinstance(log["arguments"], dict) else [
        {"arg_0": one[0], "arg_1": one[1]} for one in log["arguments"]
    ]  # fmt: skip


@pytest.mark.parametrize("bos", [False, True], ids=["no bos", "bos"])
@pytest.mark.parametrize("spec", CASES)
def test_a_tiny_model_gives_lm_evals_numbers(spec: str, bos: bool) -> None:
    compare(tiny_loaded("llama", bos=bos), tiny_model("llama", "sdpa"), spec, limit=3)
