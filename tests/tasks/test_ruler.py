"""RULER: exact lengths for every subtask and tokeniser, needles that are there once, official scoring."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.contract.data import Dataset, docstrings, filler
from kvbench.contract.registry import TASKS, expand_tasks
from kvbench.contract.task import Answer, Sample, Samples, Setting
from kvbench.errors import BadInput, DataNotFound, UnknownName
from kvbench.model.prompt import build_prompt, count_tokens
from kvbench.tasks.ruler import niah
from kvbench.tasks.ruler.fill import TooShort, fill
from kvbench.tasks.ruler.niah import NEEDLE
from kvbench.tasks.ruler.text import LINE, read_text
from tests.tasks.test_prompt import sentencepiece_like
from tests.tiny import tiny_tokenizer

NIAH = [f"niah_{kind}" for kind in (
    "single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery",
)]  # fmt: skip
GENERATED = [*NIAH, "vt", "cwe", "fwe"]
TOKENIZERS: dict[str, Any] = {
    "byte-level": tiny_tokenizer(bos=True),
    "chat": tiny_tokenizer(chat=True),
    "sentencepiece": sentencepiece_like(bos=True, eos=False),
    "words": None,  # a token is a word, a number or a mark, about what large vocabularies do
}
OFFICIAL = Path(__file__).parents[3] / "shared/data/ruler_niah_multikey_3_4096.jsonl"


def setting(name: str = "words", limit: int | None = 3, seed: int = 0, data: str | None = None) -> Setting:
    tokenizer = TOKENIZERS[name]
    if tokenizer is None:
        return Setting(seed, limit, data, False, word_tokens)
    chat = bool(tokenizer.chat_template)
    return Setting(seed, limit, data, chat, lambda sample: count_tokens(sample, tokenizer, chat))


def word_tokens(sample: Sample) -> int:
    return len(re.findall(r"\w+|[^\w\s]", sample.context + sample.question + sample.answer_prefix))


def made(spec: str, where: Setting) -> Samples:
    return TASKS.parse(f"ruler/{spec}").samples(where)


def lines_of(sample: Sample) -> list[str]:
    return sample.context.rstrip("\n").split("\n")


# --- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("subtask", GENERATED)
@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(sorted(TOKENIZERS)), length=st.integers(256, 6000), seed=st.integers(0, 3))
def test_prompt_and_room_fill_the_length_or_the_least_is_named(
    subtask: str, name: str, length: int, seed: int
) -> None:
    where = setting(name, 2, seed)
    try:
        samples = made(f"{subtask}:length={length}", where).samples
    except BadInput as error:
        least = int(str(error).split(" need ")[1].split()[0])
        assert least > length
        samples = made(f"{subtask}:length={max(least, length)}", where).samples
        length = max(least, length)
    for sample in samples:
        used = where.count(sample) + sample.max_new_tokens
        assert 0.95 * length <= used <= length


@pytest.mark.parametrize("subtask", [one for one in GENERATED if one != "cwe"])
def test_256_tokens_are_enough_where_a_word_is_a_token(subtask: str) -> None:
    for sample in made(f"{subtask}:length=256", setting(limit=20)).samples:
        assert 0.95 * 256 <= word_tokens(sample) + sample.max_new_tokens <= 256


@pytest.mark.parametrize("subtask", GENERATED)
def test_a_long_text_is_counted_few_times(subtask: str) -> None:
    sizes: list[int] = []

    def count(sample: Sample) -> int:
        sizes.append(word_tokens(sample))
        return sizes[-1]

    (sample,) = made(f"{subtask}:length=131072", Setting(0, 1, None, False, count)).samples
    assert 0.95 * 131072 <= word_tokens(sample) + sample.max_new_tokens <= 131072
    assert sum(size > 10_000 for size in sizes) <= 12


@given(
    room=st.integers(1, 5000), at_zero=st.integers(0, 300), most=st.none() | st.integers(0, 3000),
    steps=st.lists(st.integers(0, 60), min_size=1, max_size=30),
)  # fmt: skip
def test_the_search_ends_at_what_fits(room: int, at_zero: int, most: int | None, steps: list[int]) -> None:
    steps = [*steps, 1]  # something grows

    def tokens(size: int) -> int:
        whole, rest = divmod(size, len(steps))
        return at_zero + whole * sum(steps) + sum(steps[:rest])

    if at_zero > room:
        with pytest.raises(TooShort) as caught:
            fill(tokens, room, most)
        assert caught.value.least == at_zero
        return
    size = fill(tokens, room, most)
    assert tokens(size) <= room
    assert size == most or tokens(size) >= 0.985 * room or tokens(size + 1) > room


def test_a_tokenizer_without_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match="no vocabulary"):
        made("niah_single_1", Setting(0, 1, None, False, lambda sample: 0))


@pytest.mark.parametrize("spec", ["vt:length=0", "cwe:length=-3", "niah_single_1:max_new_tokens=0"])
def test_parameters_are_checked(spec: str) -> None:
    with pytest.raises(BadInput, match="1 or more"):
        TASKS.parse(f"ruler/{spec}")


# --- determinism -----------------------------------------------------------------------------------


@pytest.mark.parametrize("subtask", GENERATED)
def test_samples_depend_on_seed_and_index_only(subtask: str) -> None:
    spec = f"{subtask}:length=1100"
    many = made(spec, setting(limit=5))
    assert made(spec, setting(limit=5)) == many
    assert made(spec, setting(limit=2)).samples == many.samples[:2]
    assert made(spec, setting(limit=2)).sha256 == many.sha256
    other = made(spec, setting(limit=5, seed=1))
    assert other.sha256 != many.sha256
    assert {s.gold for s in other.samples}.isdisjoint(s.gold for s in many.samples)
    assert len({s.id for s in many.samples}) == len({s.gold for s in many.samples}) == 5


# --- needles ---------------------------------------------------------------------------------------


def facts(sample: Sample) -> list[tuple[str, str]]:
    """(key, value) of every whole needle."""
    return re.findall(
        r"One of the special magic (?:number|uuid)s for (\S+) is: (\S+)\.(?=\s)", sample.context
    )


@pytest.mark.parametrize("subtask", NIAH)
@pytest.mark.parametrize("length", [512, 2048])
def test_every_asked_needle_is_there_once(subtask: str, length: int) -> None:
    keys, values, asked = {
        "niah_multikey_1": (4, 1, 1), "niah_multivalue": (1, 4, 1), "niah_multiquery": (4, 1, 4),
    }.get(subtask, (1, 1, 1))  # fmt: skip
    for sample in made(f"{subtask}:length={length}", setting(limit=8)).samples:
        found = facts(sample)
        if subtask in ("niah_multikey_2", "niah_multikey_3"):
            assert len(found) > 5
        else:
            assert len(found) == keys * values
        assert len(set(found)) == len(found)
        named = set(re.findall(r"[\w-]+-[\w-]+", sample.question))
        assert len(named) == asked
        assert {value for key, value in found if key in named} == set(sample.gold)
        for gold in sample.gold:
            assert sample.context.count(gold) == 1
            assert gold not in sample.question + sample.answer_prefix
            assert gold in sample.reference
        assert len(sample.gold) == asked * values
        assert named == set(re.findall(r"[\w-]+-[\w-]+", sample.answer_prefix))


@pytest.mark.parametrize(
    ("subtask", "key", "value"),
    [
        ("niah_single_1", "word", "number"),
        ("niah_single_2", "word", "number"),
        ("niah_single_3", "word", "uuid"),
        ("niah_multikey_2", "word", "number"),
        ("niah_multikey_3", "uuid", "uuid"),
        ("niah_multivalue", "word", "number"),
    ],
)
def test_kinds_of_keys_and_values(subtask: str, key: str, value: str) -> None:
    patterns = {
        "word": r"[a-z]+-[a-z]+",
        "number": r"[1-9]\d{6}",
        "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    }
    for sample in made(subtask, setting()).samples:
        for name, said in facts(sample):
            assert re.fullmatch(patterns[key], name)
            assert re.fullmatch(patterns[value], said)


@pytest.mark.parametrize("subtask", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_depths_reach_every_fifth_of_the_haystack(subtask: str) -> None:
    found = made(f"{subtask}:length=700", setting(limit=60)).samples
    depths = []
    for sample in found:
        units = re.split(r"(?<=[.!?]) |\n", sample.context.split("\n", 1)[1])  # sentences or lines
        (place,) = [i for i, unit in enumerate(units) if sample.gold[0] in unit]
        depths.append(place / len(units))
    fifths = Counter(min(int(depth * 5), 4) for depth in depths)
    assert all(4 <= fifths[i] <= 24 for i in range(5))  # 12 expected; both ends are 2.6 deviations away


def test_a_needle_haystack_holds_needles_only() -> None:
    for sample in made("niah_multikey_3:length=2000", setting()).samples:
        head, *lines = lines_of(sample)
        assert head.startswith("A special magic uuid is hidden within the following text.")
        for line in lines[:-1]:
            assert re.fullmatch(NEEDLE.format(kind="uuid", key=r"\S{36}", value=r"\S{36}"), line)


def test_an_essay_is_repeated_where_it_ends_and_named_in_the_source(tmp_path: Path) -> None:
    essay = tmp_path / "essay.txt"
    essay.write_text("One went out.  Two came in!\nWho was third?\tNobody.\n")
    got = made(f"niah_single_2:length=600,haystack={essay}", setting(limit=2))
    for sample in got.samples:
        body = sample.context.split("\n", 1)[1]
        needle = re.search(r"One of the special magic numbers for \S+ is: \d+\. ?", body)
        assert needle is not None
        rest = (body[: needle.start()] + body[needle.end() :]).split()
        once = ["One", "went", "out.", "Two", "came", "in!", "Who", "was", "third?", "Nobody."]
        assert len(rest) > 300
        assert rest[:-1] == (once * len(rest))[: len(rest) - 1]
        assert once[(len(rest) - 1) % len(once)].startswith(rest[-1])
        before, after = body[: needle.start()].rstrip(), body[needle.end() :].strip()
        assert not before or not after or before[-1] in ".!?"
    assert "essay haystack" in got.source
    plain = made("niah_single_2:length=600", setting(limit=2))
    assert "not RULER's essays" in plain.source
    assert plain.sha256 != got.sha256


def test_docstrings_are_read_from_another_place_by_each_sample() -> None:
    got = made("niah_single_2:length=600,haystack=docstrings", setting(limit=6))
    assert "docstrings of Python's library" in got.source
    bodies = [sample.context.split("\n", 1)[1][:200] for sample in got.samples]
    assert len(set(bodies)) == 6


def test_text_to_train_on_is_not_the_text_of_the_tests() -> None:
    """Runs of 8 words of a training haystack are in no other haystack."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return set(zip(*(words[i:] for i in range(8)), strict=False))

    learned, tested = runs(docstrings()), runs(filler())
    assert len(learned) > 50_000 < len(tested)
    assert len(learned & tested) < 0.02 * len(tested)


@pytest.mark.parametrize("asked", [None, "hub", "python"])
@pytest.mark.parametrize("there", [True, False])
def test_essays_come_from_the_hub_where_they_can_be_had(
    asked: str | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(dataset: Dataset, data: str | None) -> tuple[list[dict[str, str]], str, str]:
        assert (dataset.hub, data) == ("baber/paul_graham_essays", None)
        if not there:
            raise DataNotFound("no source has the essays")
        return [{"text": "First essay. It is long."}, {"text": "Second essay."}], "hub, train", "0"

    monkeypatch.setattr(niah, "data_rows", rows)
    niah._haystack.cache_clear()
    task = TASKS.parse("ruler/niah_single_2:length=400" + (f",haystack={asked}" if asked else ""))
    try:
        if asked == "hub" and not there:
            with pytest.raises(DataNotFound):
                task.check(None)
            return
        made_of = task.samples(setting(limit=1))
    finally:
        niah._haystack.cache_clear()
    hub = there and asked != "python"
    assert ("First essay. It is long. Second essay." in made_of.samples[0].context) == hub
    assert ("RULER's essays (hub, train)" if hub else "Python's reference, not RULER's") in made_of.source


def test_a_haystack_is_a_text_or_rows_with_a_text_column(tmp_path: Path) -> None:
    rows, empty, other = (tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl"))
    rows.write_text('{"text": "one"}\n\n{"text": "two", "n": 1}\n')
    empty.write_text(" \n")
    other.write_text('{"texts": "one"}\n')
    assert read_text(str(rows)) == "one\n\ntwo"
    for path, message in ((empty, "no text"), (other, "line 1"), (tmp_path / "none", "no such file")):
        with pytest.raises(BadInput, match=message):
            TASKS.parse(f"ruler/niah_single_2:haystack={path}").check(None)


def test_our_prompt_is_the_official_one() -> None:
    if not OFFICIAL.is_file():
        pytest.skip("the official sample is not here")
    row = json.loads(OFFICIAL.open().readline())
    (sample,) = made("niah_multikey_3:length=2000", setting(limit=1)).samples
    query = re.findall(r"for (\S+) mentioned", row["input"])[0]
    ours = re.findall(r"for (\S+) mentioned", sample.question)[0]
    tail = row["input"][row["input"].rindex("What is") :].replace(query, ours)
    assert sample.question + sample.answer_prefix == tail
    head, *lines = row["input"][: row["input"].rindex("\nWhat is")].split("\n")
    assert lines_of(sample)[0] == head
    shape = re.compile(r"[0-9a-f-]{36}")
    assert {shape.sub("#", line) for line in lines} == {
        shape.sub("#", line) for line in lines_of(sample)[1:-1]
    }


# --- variable tracking -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [256, 700, 3000])
def test_the_chain_leads_from_the_number_to_every_variable(length: int) -> None:
    for sample in made(f"vt:length={length}", setting(limit=10)).samples:
        text = sample.context.rpartition("Memorize and track")[2]
        said = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.M)
        (value,) = re.findall(r"value (\d{5}) in", sample.question)
        assert [name for name, _ in said] == list(sample.gold)
        assert [held for _, held in said] == [value, *sample.gold[:-1]]
        assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.gold)
        assert len(set(sample.gold)) == 5
        assert sample.reference.split() == list(sample.gold)
        noise = [line for line in text.split("\n")[2:-1] if not line.startswith("VAR")]
        assert set(noise[:-1]) <= {LINE}
        assert LINE.startswith(noise[-1])


def test_assignments_are_apart_where_there_is_noise_enough() -> None:
    for sample in made("vt:length=1500", setting(limit=10)).samples:
        text = sample.context.rpartition("Memorize and track")[2]
        assert not re.search(r"^VAR.*\nVAR", text, re.M)


@pytest.mark.parametrize(("length", "lines"), [(256, None), (4096, 10)])
def test_the_solved_example_is_there_where_it_fits(length: int, lines: int | None) -> None:
    got = made(f"vt:length={length}", setting(limit=2))
    assert ("without the solved example" in got.source) == (lines is None)
    for sample in got.samples:
        parts = sample.context.split("Memorize and track")[1:]
        assert len(parts) == (1 if lines is None else 2)
        if lines is not None:
            assert parts[0].count(LINE) == lines
            names = parts[0].rpartition("they are:")[2].split()
            assert names == re.findall(r"^VAR (\w{3}) =", parts[0], re.M)


# --- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "often", "seldom", "shown"), [(1500, 6, 1, (3, 1, 20)), (5000, 30, 3, (10, 3, 40))]
)
def test_common_words_are_the_ten_most_common(
    length: int, often: int, seldom: int, shown: tuple[int, int, int]
) -> None:
    for sample in made(f"cwe:length={length}", setting(limit=3)).samples:
        example, text = (part.split("\n")[1] for part in sample.context.split("Below is")[1:])
        listed = re.findall(r"(\d+)\. (\S+)", text)
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = Counter(word for _, word in listed)
        top = counts.most_common(10)
        assert {word for word, _ in top} == set(sample.gold)
        assert {times for _, times in top} == {often}
        assert set(counts.values()) == {often, seldom}
        assert len(counts) >= 20
        solved = Counter(re.findall(r"\d+\. (\S+)", example))
        assert len(solved) == shown[2]
        assert sorted(solved.values()) == [shown[1]] * (shown[2] - 10) + [shown[0]] * 10
        assert sample.reference.startswith(f" 1. {sample.gold[0]} 2. ")


@pytest.mark.parametrize("length", [256, 300, 420, 1024, 8000])
def test_frequent_words_are_the_three_most_frequent_after_the_dots(length: int) -> None:
    for sample in made(f"fwe:length={length}", setting(limit=5)).samples:
        text = sample.context.rpartition("coded words. ")[2]
        counts = Counter(text.split()).most_common()
        assert counts[0][0] == "..."
        assert {word for word, _ in counts[1:4]} == set(sample.gold)
        assert all(times < counts[3][1] for _, times in counts[4:])
        assert all(re.fullmatch("[a-z]{6}", word) for word in sample.gold)


# --- questions -------------------------------------------------------------------------------------


def squad() -> dict[str, Any]:
    """Three articles of four paragraphs; the second question of each paragraph has no answer."""
    return {"data": [
        {"title": f"T{a}", "paragraphs": [
            {
                "context": f"Paragraph {a}.{p} says its number is n{a}{p}x. " + "More words follow. " * 9,
                "qas": [
                    {"question": f"Which number is {a}.{p}?", "is_impossible": False,
                     "answers": [{"text": f"n{a}{p}x", "answer_start": 0}] * 2},
                    {"question": "Which is none?", "is_impossible": True, "answers": []},
                ],
            } for p in range(4)
        ]} for a in range(3)
    ]}  # fmt: skip


def hotpot() -> list[dict[str, Any]]:
    return [
        {
            "_id": str(q), "question": f"Who is {q}?", "answer": f"a{q}b",
            "supporting_facts": [[f"D{q}.1", 0], [f"D{q}.3", 0]],
            "context": [[f"D{q}.{d}", [f"First of {q}.{d}.", f" Then a{q}b." * (d == 3) + " And on." * 8]]
                        for d in range(5)],
        } for q in range(6)
    ]  # fmt: skip


def hub_rows(task: str) -> list[dict[str, Any]]:
    """The same in the hub's columns."""
    if task == "qa_1":
        return [
            {"title": article["title"], "context": part["context"], "question": asked["question"],
             "answers": {"text": [one["text"] for one in asked["answers"]], "answer_start": [0]}}
            for article in squad()["data"] for part in article["paragraphs"] for asked in part["qas"]
        ]  # fmt: skip
    return [
        row | {
            "context": {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]},
            "supporting_facts": {"title": [t for t, _ in row["supporting_facts"]], "sent_id": [0, 0]},
        } for row in hotpot()
    ]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Path of each task's data, in the original layout and as rows."""
    found = {}
    for task, document in (("qa_1", squad()), ("qa_2", hotpot())):
        (tmp_path / f"{task}.json").write_text(json.dumps(document))
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in hub_rows(task)))
        found |= {task: str(tmp_path / f"{task}.json"), f"{task} rows": str(tmp_path / f"{task}.jsonl")}
    return found


def documents_of(sample: Sample) -> list[str]:
    body = sample.context.partition("given documents.\n\n")[2].removesuffix("\n\n")
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", body)[1:]
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[1::2]


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
@pytest.mark.parametrize("length", [180, 300, 400])
def test_the_answer_is_in_a_whole_document_among_others(
    task: str, length: int, files: dict[str, str]
) -> None:
    where = setting(limit=None, data=files[task])
    whole = (
        {part["context"] for article in squad()["data"] for part in article["paragraphs"]}
        if task == "qa_1"
        else {f"{title}\n{''.join(said)}" for row in hotpot() for title, said in row["context"]}
    )
    got = made(f"{task}:length={length}", where)
    assert len(got.samples) == (12 if task == "qa_1" else 6)
    places = set()
    for sample in got.samples:
        assert 0.95 * length <= word_tokens(sample) + 32 <= length
        shown = documents_of(sample)
        assert len(set(shown)) == len(shown)
        cut = [text for text in shown if text not in whole]
        assert len(cut) <= 1
        assert all(any(full.startswith(text) for full in whole) for text in cut)
        (place,) = [i for i, text in enumerate(shown) if sample.gold[0] in text]
        assert shown[place] in whole
        places.add(place)
        assert sample.reference == " " + sample.gold[0]
        assert sample.answer_prefix == " Answer:"
    assert length == 180 or len(places) > 1


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_the_original_file_and_its_rows_give_the_same(task: str, files: dict[str, str]) -> None:
    one, two = (made(f"{task}:length=300", setting(data=files[name])) for name in (task, f"{task} rows"))
    assert one.samples == two.samples
    assert one.sha256 == two.sha256
    three = made(f"{task}:length=300,file={files[task]}", setting(data="elsewhere.json"))
    assert three.samples == one.samples


def test_near_distractors_come_first(files: dict[str, str]) -> None:
    for sample in made("qa_1:length=250", setting(limit=None, data=files["qa_1"])).samples:
        (article,) = re.findall(r"is (\d)\.", sample.question)
        shown = [text for text in documents_of(sample) if len(text) > 20]
        assert len(shown) > 2
        assert all(text.startswith(f"Paragraph {article}.") for text in shown)


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [("qa_1", 80, "too short"), ("qa_2", 80, "too short"), ("qa_1", 4000, "more data")],
)
def test_lengths_that_the_documents_cannot_give(
    task: str, length: int, message: str, files: dict[str, str]
) -> None:
    with pytest.raises(BadInput, match=message):
        made(f"{task}:length={length}", setting(data=files[task]))


def test_a_question_whose_documents_do_not_fit_is_left_out(tmp_path: Path) -> None:
    document = squad()
    document["data"][0]["paragraphs"][1]["context"] += "long " * 300
    (tmp_path / "long.json").write_text(json.dumps(document))
    found = made("qa_1:length=200", setting(limit=3, data=str(tmp_path / "long.json"))).samples
    assert [sample.id for sample in found] == ["0-0", "0-2", "0-3"]


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_bad_data_is_refused_early(task: str, tmp_path: Path, files: dict[str, str]) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    other = files["qa_2" if task == "qa_1" else "qa_1"]
    for path, message in (
        (str(broken), "cannot be read as JSON"),
        (other, "another layout"),
        ("x.json", "x.json"),
    ):
        with pytest.raises(BadInput, match=message):
            TASKS.parse(f"ruler/{task}").check(path)
    with pytest.raises(BadInput, match="no column"):
        TASKS.parse(f"ruler/{task}").check(other + "l")


def test_without_any_source_there_is_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvbench.contract.data

    monkeypatch.setattr(kvbench.contract.data, "_from_hub", lambda dataset: None)
    for task in ("qa_1", "qa_2"):
        with pytest.raises(DataNotFound, match="--data"):
            made(task, setting())


# --- scoring ---------------------------------------------------------------------------------------

ALL = TASKS.parse("ruler/vt")
PART = TASKS.parse("ruler/qa_1")


@pytest.mark.parametrize(
    ("said", "found_all", "found_part"),
    [
        ("alpha", 1 / 3, 1.0),
        ("ALPHA, beta\x00 and Gamma.", 1.0, 1.0),
        ("alphabet betagamma", 1.0, 1.0),
        ("al pha", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("\x01gamma\n", 1 / 3, 1.0),
        ("al\x00pha", 0.0, 0.0),
    ],
)
def test_scores_are_rulers(said: str, found_all: float, found_part: float) -> None:
    sample = Sample("s", "c", "q", "r", gold=("Alpha", "beta", "gamma"))
    assert ALL.score(sample, Answer(text=said)) == {"string_match": pytest.approx(found_all)}
    assert PART.score(sample, Answer(text=said)) == {"string_match": found_part}
    official = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    assert official.string_match_all(official.postprocess_pred([said]), [list(sample.gold)]) == pytest.approx(
        found_all
    )


@pytest.mark.parametrize("subtask", GENERATED)
def test_the_reference_scores_full_marks(subtask: str) -> None:
    task = TASKS.parse(f"ruler/{subtask}:length=1100")
    for sample in task.samples(setting()).samples:
        assert task.score(sample, Answer(text=sample.reference)) == {"string_match": 1.0}
        assert task.score(sample, Answer(text="?")) == {"string_match": 0.0}


def test_the_answer_prefix_opens_the_models_turn() -> None:
    tokenizer = TOKENIZERS["chat"]
    for subtask in ("niah_multivalue", "vt", "fwe"):
        (sample,) = made(f"{subtask}:length=4000", setting("chat", 1)).samples
        prompt = build_prompt(sample, tokenizer, "withheld", True)
        text = tokenizer.decode(prompt.context + prompt.question)
        assert text.endswith("<|end|><|model|>" + sample.answer_prefix)
        assert sample.answer_prefix[0] != " "
        assert tokenizer.decode(prompt.context) == "<|user|>" + sample.context


# --- the group -------------------------------------------------------------------------------------


def test_ruler_stands_for_its_13_subtasks() -> None:
    everything = expand_tasks(["ruler"])
    assert sorted(everything) == sorted(f"ruler/{one}" for one in [*GENERATED, "qa_1", "qa_2"])
    assert expand_tasks(["needle", "ruler/vt:length=512", "unknown"]) == [
        "needle", "ruler/vt:length=512", "unknown",
    ]  # fmt: skip


def test_parameters_of_a_group_go_to_the_tasks_that_have_them() -> None:
    found = expand_tasks(["ruler:length=512,haystack=a.txt"])
    assert len(found) == 13
    assert "ruler/vt:length=512" in found
    assert "ruler/niah_single_2:length=512,haystack=a.txt" in found
    assert all(TASKS.parse(spec).length == 512 for spec in found)
    with pytest.raises(UnknownName, match="lenght"):
        expand_tasks(["ruler:lenght=512"])
