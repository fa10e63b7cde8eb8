"""Tasks that lm-eval defines: where the context ends, what is refused, what is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.contract import data
from kvbench.contract.metrics import METRICS
from kvbench.contract.registry import TASKS, expand_tasks, spec_of, split_specs
from kvbench.contract.task import Answer, Sample, Samples, Setting
from kvbench.errors import BadInput, UnknownName
from kvbench.model.prompt import build_prompt, count_tokens, render_turns, token_ends
from kvbench.tasks.harness.border import BEFORE, MARK, WHOLE, in_turns, marked, split
from kvbench.tasks.harness.config import find, path_of, read
from tests.tiny import CHAT, tiny_model, tiny_tokenizer

ARC = {
    "question": "Which gas is in the air?",
    "choices": {"text": ["Oxygen", "Neon light"], "label": ["1", "2"]},
    "answerKey": "1",
}
BOOLQ = {"question": "is it wet", "passage": "Water is wet.", "answer": True}
SCENE = {
    "activity_label": "Rain",
    "ctx_a": "It rains [title] now.",
    "ctx_b": "he",
    "endings": ["a", "b"],
    "label": "1",
}
EXAM = {"question": " How many? ", "subject": "anatomy", "choices": ["1", "2", "3", "4"], "answer": 2}
REPORT = {"input": "", "context": "one two three four five six seven eight nine ten", "answers": ["all"]}


def build(
    spec: str, folder: Path, *rows: Any, chat: bool = False, limit: int | None = None, **more: Any
) -> Samples:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = tiny_tokenizer(chat=chat, **more)
    setting = Setting(
        seed=0, limit=limit, data=str(path), chat=chat,
        count=lambda sample: count_tokens(sample, tokenizer, chat),
        render=lambda turns, answer=False: render_turns(turns, tokenizer, chat, answer),
        ends=lambda text: token_ends(text, tokenizer),
    )  # fmt: skip
    return TASKS.parse(spec).samples(setting)


def first(spec: str, folder: Path, *rows: Any, **more: Any) -> Sample:
    return build(spec, folder, *rows, **more).samples[0]


# Where the context ends


@pytest.mark.parametrize(
    ("border", "doc", "context"),
    [
        ("text", {"text": "a b", "ask": "c"}, "say a b\n\n"),
        ("ask", {"text": "a b", "ask": "c"}, "say a b\n\nc "),
        ("text", {"text": "", "ask": "c"}, "say \n\n"),
        ("text", {"text": "  ", "ask": "c"}, "say   \n\n"),
        ("text", {"text": "a \n", "ask": " \n"}, "say a \n\n\n \n "),
        (BEFORE, {"text": "a", "ask": "c"}, ""),
        (WHOLE, {"text": "a", "ask": "c"}, "say a\n\nc ?"),
    ],
)
def test_the_context_ends_after_the_column(border: str, doc: dict[str, str], context: str) -> None:
    def write(doc: Any) -> str:
        return f"say {doc['text']}\n\n{doc['ask']} ?"

    found = split(marked(write(doc), doc, border, write))
    assert found == (context, write(doc)[len(context) :])


def test_a_column_shown_twice_ends_the_context_at_its_last_place() -> None:
    def write(doc: Any) -> str:
        return f"{doc['a']} and {doc['a']}: why?"

    assert split(marked(write({"a": "x"}), {"a": "x"}, "a", write)) == ("x and x", ": why?")


@pytest.mark.parametrize("column", ["absent", "number", "hidden", "shouted"])
def test_a_column_that_is_not_in_the_prompt_is_refused(column: str) -> None:
    doc = {"number": 3, "hidden": "x", "shouted": "y" + MARK.lower()[:0]}

    def write(doc: Any) -> str:
        return f"{doc['number']} {doc['shouted'].replace('k', 'K')}"

    with pytest.raises(BadInput, match=f"context={column}"):
        marked(write(doc), doc, column, write)


@pytest.mark.parametrize("before", ["", " ", "one\n", "\n\n"])
@pytest.mark.parametrize("after", ["", " ", " two", "two \n"])
def test_a_template_that_strips_moves_the_border(before: str, after: str) -> None:
    def render(turns: list[dict[str, str]]) -> str:
        return "".join(f"<{turn['role']}>{turn['content'].strip()}" for turn in turns)

    turns = [{"role": "system", "content": " be brief "}, {"role": "user", "content": before + MARK + after}]
    context, question = split(in_turns(turns, render))
    assert context + question == "<system>be brief<user>" + (before + after).strip()
    head = "<system>be brief<user>"
    assert (
        context == head + before.lstrip() if after.strip() else (head + before.lstrip()).startswith(context)
    )


def test_a_template_that_changes_the_text_is_refused() -> None:
    def render(turns: list[dict[str, str]]) -> str:
        return "".join(turn["content"].replace("b", "B") for turn in turns)

    with pytest.raises(BadInput, match="alters"):
        in_turns([{"role": "user", "content": f"a {MARK} b"}], render)


# The tasks


def test_arc_has_nothing_before_the_question(tmp_path: Path) -> None:
    plain, chat = (first("arc_challenge", tmp_path, ARC, chat=chat) for chat in (False, True))
    assert (plain.context, plain.bare, chat.bare) == ("", True, True)
    assert chat.context == "<|user|>"
    assert plain.question == "Question: Which gas is in the air?\nAnswer:"
    assert plain.choices == (" Oxygen", " Neon light")
    assert not first("boolq", tmp_path, BOOLQ, chat=True).bare


def test_acc_norm_divides_by_the_choices_length(tmp_path: Path) -> None:
    sample = first("arc_challenge", tmp_path, ARC)
    score = TASKS.parse("arc_challenge").score(
        sample, Answer(loglikelihoods=(-6.0, -7.0), greedy=(False, False))
    )
    assert score == {"accuracy": 1.0, "acc_norm": 0.0}  # 6/6 > 7/10 nats per character


def test_a_hellaswag_scene_is_all_context(tmp_path: Path) -> None:
    sample = first("hellaswag", tmp_path, SCENE)
    assert (sample.context, sample.question) == ("Rain: It rains. now. He", "")
    for question in ("seen", "withheld"):
        prompt = build_prompt(sample, tiny_tokenizer(), question, False)  # type: ignore[arg-type]
        assert len(prompt.question) == 1


def test_mmlu_subjects_take_turns(tmp_path: Path) -> None:
    rows = [{**EXAM, "subject": name, "answer": 0} for name in ("virology", "anatomy", "anatomy", "virology")]
    samples = build("mmlu", tmp_path, *rows, rows[0]).samples
    assert [sample.id for sample in samples] == [
        "virology/0", "anatomy/0", "virology/1", "anatomy/1", "virology/2",
    ]  # fmt: skip
    assert build("mmlu", tmp_path, *rows, limit=3).samples == samples[:3]
    assert [sample.id for sample in build("mmlu:subject=anatomy", tmp_path, *rows).samples] == [
        "anatomy/0",
        "anatomy/1",
    ]
    assert (
        samples[0].context == "The following are multiple choice questions (with answers) about virology.\n\n"
    )


def test_mmlu_examples_are_the_first_of_the_subject(tmp_path: Path) -> None:
    shown = tmp_path / "dev.jsonl"
    others = [
        {**EXAM, "question": f"{name}{n}?", "subject": name}
        for n in range(3)
        for name in ("virology", "anatomy")
    ]
    shown.write_text("\n".join(map(json.dumps, others)))
    built = build(f"mmlu:shots=2,dev={shown}", tmp_path, EXAM)
    sample = built.samples[0]
    assert sample.context.count("Answer: C\n\n") == 2
    assert sample.context.index("anatomy0?") < sample.context.index("anatomy1?")
    assert "virology" not in sample.context
    assert sample.question.startswith("How many?\nA. 1")
    assert built.source == "file rows.jsonl; examples: file dev.jsonl"
    assert built.sha256 != build("mmlu", tmp_path, EXAM).sha256
    turns = first(f"mmlu:shots=2,dev={shown}", tmp_path, EXAM, chat=True).context
    assert turns.count("<|model|>C<|end|>") == 2  # examples are turns, the description is a system turn
    with pytest.raises(BadInput, match="there are 3 examples of anatomy"):
        build(f"mmlu:shots=4,dev={shown}", tmp_path, EXAM)


@pytest.mark.parametrize(
    "spec", ["mmlu:shots=6", "mmlu:shots=-1", "mmlu:dev=x.jsonl", "mmlu:subject=anatomie"]
)
def test_mmlu_parameters_that_make_no_sense(spec: str) -> None:
    with pytest.raises((BadInput, UnknownName)):
        TASKS.parse(spec)


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        ("arc_challenge", {**ARC, "answerKey": "9"}),
        ("arc_challenge", {**ARC, "choices": {"text": [], "label": []}}),
        ("hellaswag", {**SCENE, "label": ""}),
        ("hellaswag", {**SCENE, "label": "7"}),
        ("mmlu", {**EXAM, "subject": "alchemy"}),
        ("mmlu", {**EXAM, "answer": 4}),
        ("mmlu", {**EXAM, "choices": ["1", "2"]}),
        ("gov_report", {**REPORT, "context": None}),
        ("gov_report", {**REPORT, "answers": []}),
        ("lm_eval:arc_challenge", {"question": "what?"}),
        ("lm_eval:arc_challenge,context=passage", ARC),
    ],
)
def test_a_row_that_lm_eval_cannot_use_is_refused(spec: str, row: dict[str, Any], tmp_path: Path) -> None:
    if "gov" in spec:
        pytest.importorskip("rouge", reason="lm-eval[longbench] is not installed")
    with pytest.raises(BadInput):
        build(spec, tmp_path, row)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_row_without_a_column_of_the_others_is_refused(order: tuple[int, int], tmp_path: Path) -> None:
    """lm-eval's table takes its columns from the first row, and would lose the others or show None."""
    rows = [{**BOOLQ, "title": "Rain"}, BOOLQ]
    with pytest.raises(BadInput, match=rf"row {order.index(1) + 1} has no column title"):
        build("lm_eval:boolq", tmp_path, *(rows[i] for i in order))


def test_a_system_turn_that_the_template_refuses_is_left_out_and_said(tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHAT
    sample = first("mmlu", tmp_path, EXAM, chat=True, template=refuses)
    assert "multiple choice" not in sample.context
    assert sample.note == "the chat template takes no system turn: lm-eval leaves the description out"
    assert sample.bare
    kept = first("mmlu", tmp_path, EXAM, chat=True)
    assert (kept.note, kept.bare, "multiple choice" in kept.context) == ("", False, True)


@pytest.mark.parametrize("chat", [False, True])
def test_one_bos(chat: bool, tmp_path: Path) -> None:
    """The tokeniser adds one to plain text, and none to what a template has written."""
    for template, wanted in ((CHAT, 0), ("<|bos|>" + CHAT, 1)):
        sample = first("boolq", tmp_path, BOOLQ, chat=chat, bos=True, template=template)
        prompt = build_prompt(
            sample, tiny_tokenizer(chat=chat, bos=True, template=template), "withheld", chat
        )
        assert (prompt.context + prompt.question).count(1) == (wanted if chat else 1)


# LongBench


def test_the_middle_of_a_long_document_is_cut_and_counted(tmp_path: Path) -> None:
    pytest.importorskip("rouge", reason="lm-eval[longbench] is not installed")
    long = {**REPORT, "context": "start " + "middle words " * 400 + "finish"}
    whole = first("gov_report", tmp_path, long)
    tokenizer = tiny_tokenizer()
    for limit in (1500, 2500):
        sample = first(f"gov_report:max_tokens={limit}", tmp_path, long)
        used = count_tokens(sample, tokenizer, False) + sample.max_new_tokens
        assert limit - 8 <= used <= limit
        assert sample.cut == pytest.approx(count_tokens(whole, tokenizer, False) + 512 - used, abs=8)
        assert "start middle" in sample.context
        assert sample.context.endswith("finish\n\n")
        assert "cut" in sample.note
    fitting = first("gov_report:max_tokens=9000", tmp_path, long)
    assert (fitting.cut, fitting.note, fitting.context) == (0, "", whole.context)
    with pytest.raises(BadInput, match="no room for the document"):
        first("gov_report:max_tokens=600", tmp_path, long)


def test_what_is_too_long_is_skipped_and_the_row_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("rouge", reason="lm-eval[longbench] is not installed")
    model = tiny_model("llama", "sdpa")
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    reads = model.config.max_position_embeddings
    (tmp_path / "rows.jsonl").write_text(json.dumps({**REPORT, "context": "one two " * reads}))
    config = kvbench.RunConfig(
        ("knorm",), ("gov_report",), (8,), str(tmp_path / "model"), data=str(tmp_path / "rows.jsonl"),
        out=str(tmp_path / "run"),
    )  # fmt: skip
    rows = kvbench.run(config, progress=False).rows
    assert set(rows["status"]) == {"skipped"}
    (reason,) = set(rows["reason"])
    assert f"the model reads {reads}; the task's max_tokens=N cuts the middle" in reason


def test_the_summary_is_asked_for_after_the_report(tmp_path: Path) -> None:
    pytest.importorskip("rouge", reason="lm-eval[longbench] is not installed")
    sample = first("gov_report", tmp_path, REPORT)
    assert sample.context.endswith("nine ten\n\n")
    assert sample.question == "Now, write a one-page summary of the report.\n\nSummary:"
    assert sample.max_new_tokens == 512


@pytest.mark.parametrize("name", ["hotpotqa", "passage_retrieval_en", "gov_report", "trec"])
def test_the_published_input_column_is_read(tmp_path: Path, name: str) -> None:
    """lm-eval's copy of LongBench calls it `question`."""
    pytest.importorskip("rouge", reason="lm-eval[longbench] is not installed")
    published = {"input": "Who wrote it?", "context": "Somebody wrote it.", "answers": ["Somebody"]}
    published |= {"all_classes": ["Somebody"]}
    copied = {"question" if key == "input" else key: value for key, value in published.items()}
    ours, theirs = (first(f"lm_eval:longbench_{name}", tmp_path, one) for one in (published, copied))
    assert ours.context + ours.question == theirs.context + theirs.question
    assert name == "gov_report" or "Who wrote it?" in ours.context + ours.question


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rouge" else found(name))
    with pytest.raises(BadInput, match=r"pip install .*rouge"):
        TASKS.parse("gov_report").check(None)


# Any task


def test_a_task_by_its_name_equals_ours(tmp_path: Path) -> None:
    ours, general = (first(spec, tmp_path, ARC) for spec in ("arc_challenge", "lm_eval:arc_challenge"))
    assert ours.context + ours.question == general.context + general.question
    assert (ours.choices, ours.reference) == (general.choices, general.reference)
    assert build("lm_eval:arc_challenge", tmp_path, ARC).metric == "accuracy"


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_prefix_is_followed_by_a_space(chat: bool, tmp_path: Path) -> None:
    """As in lm-eval: a reference that nobody would write ("is" + "A") measures nothing."""
    four = ARC | {"choices": {"text": ["Oxygen", "Neon", "Iron", "Salt"], "label": ["1", "2", "3", "4"]}}
    sample = first("lm_eval:arc_challenge_chat", tmp_path, four, chat=chat)
    assert (sample.context + sample.question).endswith("The best answer is")
    assert sample.reference == " A"


def test_a_context_column_withholds_the_rest(tmp_path: Path) -> None:
    row = {**ARC, "question": "One. Two?"}
    task = TASKS.parse("lm_eval:arc_challenge,context=question")
    assert (task.question, TASKS.parse("lm_eval:arc_challenge").question) == ("withheld", "seen")
    sample = first("lm_eval:arc_challenge,context=question", tmp_path, row)
    assert (sample.context, sample.question) == ("Question: One. Two?\n", "Answer:")


def test_the_short_form_is_the_long_form() -> None:
    short, long = "lm_eval:gsm8k,context=question", "lm_eval:task=gsm8k,context=question"
    assert TASKS.parse(short) == TASKS.parse(long)
    assert spec_of(TASKS.parse(short)) == long
    assert split_specs(f"boolq,{short},mmlu") == ["boolq", short, "mmlu"]
    assert expand_tasks([short]) == [short]


@pytest.mark.parametrize(
    "spec", ["mmlu:5", "needle:512", "ruler:512", "lm_eval", "lm_eval:", "lm_eval:gsm8k,task=gsm8k"]
)
def test_a_value_without_a_name_needs_a_parameter_that_must_be_given(spec: str) -> None:
    with pytest.raises(BadInput):
        TASKS.parse(expand_tasks([spec])[0])


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("wikitext", "loglikelihood_rolling"),
        ("lambada_openai", "loglikelihood;"),
        ("humaneval", "runs code"),
        ("squadv2", "class of its own"),
        ("mmmu_val_accounting", "images"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_loads(task: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        TASKS.parse(f"lm_eval:{task}").check(None)


def test_choices_with_prompts_of_their_own_are_refused(tmp_path: Path) -> None:
    row = {"sentence": "The _ is wet.", "option1": "sea", "option2": "sun", "answer": "1"}
    with pytest.raises(BadInput, match="prompt of its own"):
        build("lm_eval:winogrande", tmp_path, row)


def test_a_name_that_is_not_there_gets_close_ones() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'arc_challenge'"):
        TASKS.parse("lm_eval:arc_chalenge").check(None)


def test_without_data_the_hub_is_named() -> None:
    with pytest.raises(data.DataNotFound, match="--data"):
        TASKS.parse("lm_eval:gsm8k").check(None)


def test_metrics_that_are_not_means_are_left_out(tmp_path: Path) -> None:
    """cb reports acc and a macro F1 over all answers."""
    row = {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0}
    task = TASKS.parse("lm_eval:cb")
    score = task.score(
        first("lm_eval:cb", tmp_path, row), Answer(loglikelihoods=(-1, -2, -3), greedy=(True,) * 3)
    )
    assert score == {"accuracy": 1.0}


def test_a_new_metric_is_declared_with_its_direction(tmp_path: Path) -> None:
    row = {"question": "Who?", "answer": "me"}
    assert build("lm_eval:gsm8k,shots=0", tmp_path, {**row, "answer": "#### 1"}).metric in METRICS
    assert METRICS["exact_match/strict-match"].better == "higher"


# Configurations


@pytest.mark.parametrize(
    "file",
    [
        "arc/arc_challenge.yaml",
        "hellaswag/hellaswag.yaml",
        "mmlu/default/mmlu_virology.yaml",
        "gsm8k/gsm8k.yaml",
        "super_glue/boolq/default.yaml",
        "truthfulqa/truthfulqa_mc2.yaml",
    ],
)
def test_a_configuration_is_what_lm_eval_reads(file: str) -> None:
    loader = pytest.importorskip("lm_eval.tasks._yaml_loader", reason="lm-eval 0.4.10 moved its loader")
    theirs = loader.load_yaml(path_of(file))
    mine = read(path_of(file))
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        same = value.__qualname__ == theirs[key].__qualname__ if callable(value) else value == theirs[key]
        assert same, key
    assert find(mine["task"]).name == Path(file).name


def test_listing_and_checking_import_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ARC))
    code = (
        "import sys; from kvbench.contract.registry import TASKS; TASKS.failures(); "
        "TASKS.parse('lm_eval:arc_challenge').check(sys.argv[1]); "
        "sys.exit(any(name in sys.modules for name in ('lm_eval', 'torch', 'transformers', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0


def test_rows_say_what_was_cut_and_what_could_not_be_evicted(tmp_path: Path) -> None:
    pytest.importorskip("rouge", reason="lm-eval[longbench] is not installed")
    tiny_model("llama", "sdpa").save_pretrained(tmp_path / "model")
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    rows = {
        "arc_challenge": [ARC],
        "gov_report:max_tokens=900": [REPORT, {**REPORT, "context": "one two " * 99}],
    }
    for index, (task, data_rows) in enumerate(rows.items()):
        path = tmp_path / f"{index}.jsonl"
        path.write_text("\n".join(map(json.dumps, data_rows)))
        config = kvbench.RunConfig(
            ("knorm",), (task,), (8,), str(tmp_path / "model"), question="withheld", data=str(path),
            out=str(tmp_path / f"run{index}"),
        )  # fmt: skip
        result = kvbench.run(config, progress=False)
        found = result.rows[result.rows["policy"] == "knorm"]
        if index:
            assert found["cut_tokens"].tolist()[0] == 0
            assert found["cut_tokens"].tolist()[1] > 100
            assert found["note"].tolist() == ["", "the middle of the document is cut to fit max_tokens=900"]
            assert any("1 of 2 samples: the middle" in note for note in result.notes)
        else:
            assert found["context_tokens"].tolist() == [1]  # the template opens the user's turn
            assert "nothing precedes the question" in found["note"].item()
            assert any("1 of 1 samples: nothing precedes" in note for note in result.notes)
