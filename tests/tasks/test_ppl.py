"""Perplexity: the brute-force number, whole turns, disjoint halves, ids of one tokenisation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbench
from kvbench.contract.registry import TASKS, expand_tasks
from kvbench.contract.task import Answer, Sample, Samples, Setting
from kvbench.errors import BadInput, DataNotFound
from kvbench.model.prompt import build_prompt, count_tokens, render_turns, token_ends, uses_chat
from kvbench.tasks.ppl.trees import dialogues, half
from tests.tasks.test_prompt import sentencepiece_like
from tests.tiny import CHAT, tiny_model, tiny_tokenizer

BOS_CHAT = "{{ bos_token }}" + CHAT
TOKENIZERS: dict[str, Any] = {
    "plain": tiny_tokenizer(),
    "bos": tiny_tokenizer(bos=True),
    "chat": tiny_tokenizer(chat=True),
    "chat with bos": tiny_tokenizer(chat=True, bos=True, template=BOS_CHAT),
    "stripping": tiny_tokenizer(chat=True, template=CHAT.replace("m.content", "m.content | trim")),
    "sentencepiece": sentencepiece_like(bos=True, eos=False),
}


def setting(name: str, limit: int | None = None, seed: int = 0, data: str | None = None) -> Setting:
    tokenizer = TOKENIZERS[name]
    chat = uses_chat(tokenizer, "auto")
    return Setting(
        seed,
        limit,
        data,
        chat,
        count=lambda sample: count_tokens(sample, tokenizer, chat),
        render=lambda turns: render_turns(turns, tokenizer, chat),
        ends=lambda text: token_ends(text, tokenizer),
    )


def message(name: str, parent: str | None, text: str, **changes: Any) -> dict[str, Any]:
    row = {
        "message_id": name, "parent_id": parent, "message_tree_id": name.split(".")[0], "text": text,
        "role": "assistant" if name.count(".") % 2 else "prompter", "rank": None, "deleted": False,
        "lang": "en",
    }  # fmt: skip
    return row | changes


def trees(count: int = 30) -> list[dict[str, Any]]:
    """Trees of one to three exchanges; every reply has a worse sibling and a deleted better one."""
    rows = []
    for tree in range(count):
        parent: str | None = None
        name = f"t{tree}"
        for depth in range(2 * (1 + tree % 3)):
            text = f"turn {depth} of tree {tree} is the answer yes" + " no" * (tree % 5 + depth)
            for rank, wrong in ((1, {}), (0, {"deleted": True})) if depth else ():
                rows.append(
                    message(f"{name}.{rank}", parent, "wrong", rank=rank - 1, **wrong) | {"rank": 2 * rank}
                )
            rows.append(message(name, parent, text, rank=1 if depth else None))
            parent, name = name, f"{name}.9"
    return rows


@pytest.fixture(scope="module")
def oasst(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("oasst") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in trees()))
    return str(path)


def made(spec: str, where: Setting) -> Samples:
    return TASKS.parse(f"ppl/{spec}").samples(where)


def test_a_dialogue_is_the_best_path_and_ends_with_the_model() -> None:
    rows = [
        message("a", None, "hello"),
        message("a.1", "a", "second best", rank=1),
        message("a.2", "a", "best", rank=0),
        message("a.3", "a", "deleted", rank=-1, deleted=True),
        message("a.4", "a", "unranked"),
        message("a.2.1", "a.2", "asked again"),
        message("b", None, "nobody answers"),
        message("c", None, "gone", deleted=True),
        message("c.1", "c", "answer to what is gone", rank=0),
        message("d", None, "bonjour", lang="fr"),
        message("d.1", "d", "salut", lang="fr", rank=float("nan")),
        message("e", None, "equal ranks"),
        message("e.1", "e", "first", rank=0),
        message("e.2", "e", "later", rank=0),
        message("f", None, "empty answer"),
        message("f.1", "f", " ", rank=0),
    ]
    found = {one.tree: [turn["content"] for turn in one.turns] for one in dialogues(rows)}
    assert found == {"a": ["hello", "best"], "d": ["bonjour", "salut"], "e": ["equal ranks", "first"]}
    assert [one.tree for one in dialogues(rows, "en")] == ["a", "e"]
    assert [turn["role"] for turn in dialogues(rows)[0].turns] == ["user", "assistant"]


def turns_of(text: str, chat: bool) -> list[tuple[str, str]]:
    """(role, content) read back from a rendered prompt whose last turn is open."""
    if chat:
        parts = text.replace("<|bos|>", "").replace("<|end|>", "").split("<|")[1:]
        return [(part.split("|>")[0], part.split("|>")[1]) for part in parts]
    lines = text.split("\n")
    return [
        (line.split(":")[0].replace("Assistant", "model").lower(), line.partition(": ")[2]) for line in lines
    ]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("length", [300, 700, 3000])
def test_turns_are_whole_and_fill_the_length(name: str, length: int, oasst: str) -> None:
    where = setting(name, data=oasst)
    known = {one.tree: one.turns for one in dialogues(trees())}
    texts = {turn["content"] for turns in known.values() for turn in turns}
    for sample in made(f"oasst:length={length},split=all", where).samples:
        used = where.count(sample)
        assert 0.75 * length <= used <= length
        *shown, (last, opened) = turns_of(sample.context + sample.question, where.chat)
        assert (last, opened) == ("model", "")
        assert [role for role, _ in shown] == ["user", "model"] * (len(shown) // 2) + ["user"]
        assert {text for _, text in shown} <= texts
        own = [turn["content"] for turn in known[sample.id]]
        assert shown[-1][1] == own[-2]
        assert own[-1].startswith(sample.reference.lstrip())
        seen = [text for _, text in shown]
        assert len(set(seen)) == len(seen)
        count = (
            next(i for i, text in enumerate(reversed([*seen, own[-1]])) if text not in own)
            if any(text not in own for text in seen)
            else len(own)
        )
        assert [*seen, own[-1]][-count:] == own[-count:]  # its own turns are last, and in order


def test_a_dialogue_as_it_is(oasst: str) -> None:
    where = setting("chat", data=oasst)
    for sample in made("oasst:length=0,split=all", where).samples:
        turns = next(one.turns for one in dialogues(trees()) if one.tree == sample.id)
        assert sample.context == where.render(turns[:-1])
        assert sample.question == "<|model|>"
        assert sample.reference == turns[-1]["content"]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("question", ["withheld", "seen"])
def test_ids_are_those_of_one_tokenisation(name: str, question: Any, oasst: str) -> None:
    tokenizer, where = TOKENIZERS[name], setting(name, data=oasst)
    for sample in made("oasst:length=0,split=all,continuation=9999", where).samples:
        prompt = build_prompt(sample, tokenizer, question, where.chat)
        turns = next(one.turns for one in dialogues(trees()) if one.tree == sample.id)
        ids = prompt.context + prompt.question + prompt.reference.ids
        if where.chat:
            whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
            assert list(ids) == whole[: len(ids)]
            assert tokenizer.decode(whole[len(ids) :]) == "<|end|>"
        else:
            text = render_turns(turns, tokenizer, False).rstrip("\n")
            assert list(ids) == tokenizer(text)["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == (1 if tokenizer.bos_token else 0)
        assert prompt.reference.scored == len(prompt.reference.ids)
        header = tokenizer.decode(prompt.question)
        if question == "withheld":
            assert header == ("<|model|>" if where.chat else "Assistant:")
        assert prompt.question


def test_a_template_that_opens_no_turn_gives_the_last_token_to_the_question(oasst: str) -> None:
    bare = "{% for m in messages %}{{ m.content }}{{ '<|end|>' }}{% endfor %}"
    tokenizer = tiny_tokenizer(chat=True, template=bare)
    where = Setting(
        0, 3, oasst, True, lambda s: count_tokens(s, tokenizer, True),
        lambda turns: render_turns(turns, tokenizer, True), lambda text: token_ends(text, tokenizer),
    )  # fmt: skip
    for sample in made("oasst:length=0,split=all", where).samples:
        prompt = build_prompt(sample, tokenizer, "withheld", True)
        assert tokenizer.decode(prompt.question) == "<|end|>"


def test_a_template_that_alters_the_answer_is_refused(oasst: str) -> None:
    tokenizer = tiny_tokenizer(chat=True, template=CHAT.replace("m.content", "m.content | upper"))
    where = Setting(
        0, 3, oasst, True, lambda s: count_tokens(s, tokenizer, True),
        lambda turns: render_turns(turns, tokenizer, True), lambda text: token_ends(text, tokenizer),
    )  # fmt: skip
    with pytest.raises(BadInput, match="template"):
        made("oasst:length=0", where)


def test_the_continuation_is_capped_in_tokens(oasst: str) -> None:
    where = setting("chat", data=oasst)
    for sample in made("oasst:continuation=7,split=all", where).samples:
        assert build_prompt(sample, TOKENIZERS["chat"], "withheld", True).reference.scored == 7


def test_the_halves_are_disjoint_and_cover_everything(oasst: str) -> None:
    where = setting("chat", data=oasst)
    ids = {
        split: [s.id for s in made(f"oasst:length=0,split={split}", where).samples]
        for split in ("train", "heldout", "all")
    }
    assert sorted(ids["train"] + ids["heldout"]) == sorted(ids["all"])
    assert set(ids["train"]).isdisjoint(ids["heldout"])
    assert {s.id for s in made("oasst:length=0", where).samples} == set(ids["heldout"])
    for split in ("train", "heldout"):
        for sample in made(f"oasst:length=900,split={split}", where).samples:
            shown = {text.split(" tree ")[1].split()[0] for _, text in turns_of(sample.context, True)}
            assert {half(f"t{tree}") for tree in shown} == {split}
    assert 400 < sum(half(str(i)) == "train" for i in range(1000)) < 600


def test_samples_depend_on_seed_and_tree_only(oasst: str) -> None:
    many = made("oasst:length=900", setting("chat", 6, data=oasst))
    assert made("oasst:length=900", setting("chat", 6, data=oasst)) == many
    assert made("oasst:length=900", setting("chat", 2, data=oasst)).samples == many.samples[:2]
    other = made("oasst:length=900", setting("chat", 6, seed=1, data=oasst))
    assert [s.reference for s in other.samples] == [s.reference for s in many.samples]
    assert [s.context for s in other.samples] != [s.context for s in many.samples]
    assert other.sha256 == many.sha256


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("oasst:length=-1", "length from 0"),
        ("oasst:continuation=0", "continuation from 1"),
        ("oasst:length=99999", "lower length"),
        ("oasst:length=12", "raise it"),
        ("oasst:language=xx", "no dialogue"),
        ("text:length=1", "length from 2"),
        ("text:length=99999", "longer text"),
    ],
)
def test_lengths_that_cannot_be(spec: str, message: str, oasst: str) -> None:
    with pytest.raises(BadInput, match=message):
        made(spec, setting("chat", data=oasst))


def test_a_missing_source_is_named_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import kvbench.contract.data

    monkeypatch.setattr(kvbench.contract.data, "_from_hub", lambda dataset: None)
    monkeypatch.setattr(kvbench.contract.data, "hub_reachable", lambda: False)
    with pytest.raises(DataNotFound, match="oasst2"):
        TASKS.parse("ppl/oasst").check(None)
    with pytest.raises(BadInput, match="no such file"):
        TASKS.parse("ppl/text").check(str(tmp_path / "none.txt"))


WORDS = ["the world", " is in", "\n\n", "yes", " 12", "é🙂", "hello", " ", "日本"]


@pytest.mark.parametrize("name", ["plain", "bos", "sentencepiece"])
@settings(max_examples=20, deadline=None)
@given(
    parts=st.lists(st.sampled_from(WORDS), min_size=150, max_size=400),
    length=st.integers(5, 60),
    continuation=st.integers(1, 30),
)
def test_windows_have_the_length_and_do_not_overlap(
    tmp_path_factory: pytest.TempPathFactory, name: str, parts: list[str], length: int, continuation: int
) -> None:
    text = "x" + "".join(parts)
    path = tmp_path_factory.mktemp("text") / "one.txt"
    path.write_text(text)
    where = setting(name, data=str(path))
    found = made(f"text:length={length},continuation={continuation}", where).samples
    assert text.startswith("".join(sample.context + sample.reference for sample in found))
    tokens = len(where.ends(text))
    assert len(found) >= (tokens - length - continuation) // (length + continuation + 7)
    for sample in found:
        assert abs(where.count(sample) - length) <= 3  # a character takes up to four tokens
        assert continuation - 3 <= len(where.ends(sample.reference)) <= continuation + 3
        assert not sample.rendered
        assert sample.question == ""
    one = made(f"text:length={length},continuation={continuation}", setting(name, 1, data=str(path)))
    assert one.samples == found[:1]


def test_without_data_the_text_is_pythons_own() -> None:
    got = made("text:length=100", setting("plain", 2))
    assert got.source == "Python's own reference"
    assert [setting("plain").count(sample) for sample in got.samples] == [100, 100]


def test_nothing_is_scored() -> None:
    for spec in ("oasst", "text"):
        task = TASKS.parse(f"ppl/{spec}")
        assert task.score(Sample("s", "c", "q", "r"), Answer()) == {}
        assert task.metric == "ppl"
    assert expand_tasks(["ppl"]) == ["ppl/oasst", "ppl/text"]


# --- against a brute-force loop ----------------------------------------------------------------------


def brute_force(model: Any, ids: list[int], scored: int) -> float:
    """Mean nats of the last `scored` ids, summed up from the plain model's own forward."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    nats = 0.0
    for index in range(len(ids) - scored, len(ids)):
        shifted = logits[index - 1]
        nats += math.log(sum(math.exp(value) for value in shifted.tolist())) - float(shifted[ids[index]])
    return nats / scored


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", "sdpa").save_pretrained(path)
    tiny_tokenizer(chat=True, bos=True, template=BOS_CHAT).save_pretrained(path)
    return str(path)


def rows_of(folder: str, task: str, data: str, out: Path, limit: int) -> Any:
    config = kvbench.RunConfig(
        ("knorm",), (task,), (20, 5000), model=folder, data=data, limit=limit, device="cpu", out=str(out)
    )
    return kvbench.run(config, progress=False).rows


def test_ppl_of_a_document_of_1000_tokens_is_the_brute_force_number(folder: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat=True, bos=True)
    text = "".join(f"line {i}: the world is in {i * 37 % 11}, yes\n" for i in range(80))
    ends = token_ends(text, tokenizer)
    assert len(ends) > 1000
    text = text[: ends[999]]
    data = tmp_path / "document.txt"
    data.write_text(text)
    rows = rows_of(folder, "ppl/text:length=901,continuation=100", str(data), tmp_path / "out", 1)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 1001  # with the BOS
    expected = brute_force(tiny_model("llama", "sdpa"), ids, 100)
    assert list(rows["template"].unique()) == ["none"]
    for _, row in rows[rows["budget"] != 20].iterrows():
        assert row["metric:nll_tokens"] == 100
        assert row["metric:nll"] == pytest.approx(expected, abs=2e-4)
        assert math.isnan(row["metric:agreement"])
        assert row["context_tokens"] + row["question_tokens"] == 901
    evicted = rows[rows["budget"] == 20].iloc[0]
    assert math.isfinite(evicted["metric:nll"])
    assert evicted["metric:nll"] != pytest.approx(expected, abs=2e-4)


def test_ppl_of_a_dialogue_is_the_brute_force_number(folder: str, oasst: str, tmp_path: Path) -> None:
    rows = rows_of(folder, "ppl/oasst:length=0,split=all,continuation=20", oasst, tmp_path / "out", 3)
    tokenizer, model = tiny_tokenizer(chat=True, bos=True, template=BOS_CHAT), tiny_model("llama", "sdpa")
    known = {one.tree: one.turns for one in dialogues(trees())}
    full = rows[rows["budget"].isna()]
    assert len(full) == 3
    for _, row in full.iterrows():
        text = tokenizer.apply_chat_template(known[row["sample"]], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = int(row["context_tokens"] + row["question_tokens"])
        assert ids[prompt - 1] == 3  # <|model|>
        assert row["metric:nll_tokens"] == 20
        expected = brute_force(model, ids[: prompt + 20], 20)
        assert row["metric:nll"] == pytest.approx(expected, abs=2e-4)
        assert row["text"] == ""
        assert row["label"] is None
