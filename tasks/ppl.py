"""Perplexity of a continuation, given a compacted context: dialogues (ppl/oasst) and running text (ppl/text).

One message of OpenAssistant's flat rows, shortened; a tree of them is one prompt and all that followed:

    {"message_id": "e0cf", "parent_id": null, "message_tree_id": "e0cf", "role": "prompter", "rank": null,
     "deleted": false, "lang": "en", "text": "What do you think about ChatGPT?"}

The quirk that matters: siblings are alternative replies, so a dialogue is one path through a tree.
Nothing is generated. The engine teacher-forces the reference; nll and ppl are its numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbench.contract.data import Dataset, check, filler, rows
from kvbench.contract.identity import fingerprint
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import PLACEHOLDER, Answer, Sample, Samples, Setting, Task
from kvbench.errors import BadInput

from .ruler.text import read_text

OASST = Dataset(
    hub="OpenAssistant/oasst2",
    config=None,
    split="validation",
    folder=None,
    columns=("message_id", "parent_id", "message_tree_id", "role", "text", "rank", "deleted", "lang"),
)
ROLES = {"prompter": "user", "assistant": "assistant"}
FILLED = 0.75  # share of the length below which a joined dialogue is refused

Turn = dict[str, str]


class Perplexity(Task):
    """Base: nothing is answered, only the reference is measured."""

    metric = "ppl"
    takes_data = True
    question = "withheld"

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Dialogue:
    """The best-ranked path of one tree, from a user's turn to a model's turn."""

    tree: str
    turns: list[Turn]

    @property
    def exchanges(self) -> list[list[Turn]]:
        """Pairs of a user's turn and the model's answer."""
        return [self.turns[i : i + 2] for i in range(0, len(self.turns), 2)]


@register_task("ppl/oasst", source="OpenAssistant/oasst2")
@dataclass(frozen=True)
class Oasst(Perplexity):
    """Perplexity of the last answer in a dialogue of OpenAssistant, in the model's own chat template.

    Context: everything before the header of the last answer; question: that header; reference: the
    first `continuation` tokens of the answer. Without a chat template turns are lines "User: ..." and
    "Assistant: ...". A dialogue follows the best-ranked replies (lowest rank, then the file's order)
    from the root; deleted messages and what hangs on them are left out, as is a last turn of the user.

    length: tokens of the prompt at most; 0: every dialogue as it is. A dialogue that is longer gives its
    last exchanges that fit. In front of one that is shorter stand others of the same split, in an
    order drawn from the seed: whole ones that fit, then single first exchanges that still fit. No turn
    is ever cut. Dialogues whose last exchange does not fit are left out.
    split: by SHA-256 of the tree's id, even is train and odd is heldout, about half each. KVP
    trains on the former.

    Source: OpenAssistant Conversations 2, arXiv:2304.07327; the use as in KVP.
    Differs: KVP does not publish how its dialogues were joined or cut.
    """

    data = "OpenAssistant messages (--data, or the hub's oasst2 validation)"

    length: int = param(512, "ours: within a 135M model's reach; KVP: 4096")
    continuation: int = param(128, "ours: an answer's beginning")
    split: Literal["train", "heldout", "all"] = param("heldout", "ours: KVP trains on the other half")
    language: str | None = param("en", "ours: our models are English")

    def __post_init__(self) -> None:
        if self.length < 0 or self.continuation < 1:
            raise BadInput(
                f"ppl/oasst: length={self.length}, continuation={self.continuation}: tokens, length from 0 "
                "and continuation from 1"
            )

    def check(self, data: str | None) -> None:
        check(OASST, data)

    def samples(self, setting: Setting) -> Samples:
        found, source, sha256 = rows(OASST, setting.data)
        chosen = [one for one in dialogues(found, self.language) if self.split in ("all", half(one.tree))]
        if not chosen:
            raise BadInput(
                f"ppl/oasst: {source} has no dialogue with split={self.split}, language={self.language}"
            )
        joiner = _Joiner(chosen, self.length, setting)
        made: list[Sample] = []
        for index, dialogue in enumerate(chosen):
            turns = joiner.turns(index)
            if turns and len(made) != setting.limit:
                made.append(_sample(dialogue.tree, turns, setting, self.continuation))
        if not made:
            raise BadInput(
                f"ppl/oasst:length={self.length}: no dialogue's last exchange is that short; raise it"
            )
        return Samples(made, source, sha256)


def half(tree: str) -> str:
    """ "train" or "heldout", for a tree's id."""
    return "heldout" if hashlib.sha256(tree.encode()).digest()[-1] % 2 else "train"


def dialogues(messages: Sequence[dict[str, Any]], language: str | None = None) -> list[Dialogue]:
    """The best-ranked path of every tree with at least one answer, in the order of their roots."""
    children: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        children.setdefault(message["parent_id"], []).append(message)
    found = []
    for root in children.get(None, []):  # type: ignore[call-overload]
        if language is not None and root["lang"] != language:
            continue
        turns = list(_path(root, children))
        turns = turns[: len(turns) // 2 * 2]
        if turns:
            found.append(Dialogue(root["message_tree_id"], turns))
    return found


def _path(root: dict[str, Any], children: dict[str, list[dict[str, Any]]]) -> Iterator[Turn]:
    """Turns from the root on, while they alternate between user and model."""
    message: dict[str, Any] | None = root if not root["deleted"] else None
    expected = "prompter"
    while message is not None and message["role"] == expected and message["text"].strip():
        yield {"role": ROLES[expected], "content": message["text"]}
        expected = "assistant" if expected == "prompter" else "prompter"
        replies = [reply for reply in children.get(message["message_id"], []) if not reply["deleted"]]
        message = min(replies, key=_rank, default=None)


def _rank(message: dict[str, Any]) -> float:
    rank = message["rank"]
    return float(rank) if rank is not None and rank == rank else float("inf")


@dataclass
class _Joiner:
    """Fills a length with whole turns. costs: tokens that a piece adds to a dialogue."""

    dialogues: list[Dialogue]
    length: int
    setting: Setting
    costs: dict[tuple[int, int, int], int] = field(default_factory=dict)
    fixed: int | None = None

    def turns(self, index: int) -> list[Turn]:
        """The turns of sample `index`; empty when its last exchange does not fit."""
        own = self.dialogues[index].exchanges
        if not self.length:
            return self.dialogues[index].turns
        if self._prompt(own[-1]) > self.length:
            return []
        pieces = self._pieces(index, own)
        used = self._prompt(_flat(pieces))
        while used > self.length:  # the estimate was too low
            pieces = pieces[1:]
            used = self._prompt(_flat(pieces))
        if used < FILLED * self.length:
            raise BadInput(
                f"ppl/oasst:length={self.length}: all the dialogues there are fill {used} tokens; lower "
                "length, give more data or take split=all"
            )
        return _flat(pieces)

    def _pieces(self, index: int, own: list[list[Turn]]) -> list[list[Turn]]:
        """Pieces whose estimated tokens fill the length, the sample's own last exchange at the end."""
        left = self.length - self._prompt(own[-1])
        pieces = [own[-1]]
        start = len(own) - 1
        while start and self._cost(index, start - 1, start) <= left:
            start -= 1
            left -= self._cost(index, start, start + 1)
            pieces.insert(0, own[start])
        others = [i for i in range(len(self.dialogues)) if i != index]
        random.Random(f"oasst {self.setting.seed} {self.dialogues[index].tree}").shuffle(others)
        front: list[list[Turn]] = []
        for whole in (True, False):
            for other in list(others):
                exchanges = self.dialogues[other].exchanges
                size = len(exchanges) if whole else 1
                cost = self._cost(other, 0, size)
                if cost <= left:
                    left -= cost
                    front.append(_flat(exchanges[:size]))
                    others.remove(other)
        return front + pieces

    def _cost(self, index: int, start: int, stop: int) -> int:
        key = (index, start, stop)
        if key not in self.costs:
            if self.fixed is None:
                pair = self.dialogues[index].exchanges[0]
                self.fixed = 2 * self._count(pair) - self._count(pair + pair)
            self.costs[key] = self._count(_flat(self.dialogues[index].exchanges[start:stop])) - self.fixed
        return self.costs[key]

    def _count(self, turns: list[Turn]) -> int:
        return self.setting.count(Sample("", self.setting.render(turns), "", "", rendered=True))

    def _prompt(self, turns: list[Turn]) -> int:
        context, question, _ = _parts(turns, self.setting)
        return self.setting.count(Sample("", context, question, "", rendered=True))


def _flat(pieces: Sequence[list[Turn]]) -> list[Turn]:
    return [turn for piece in pieces for turn in piece]


def _sample(name: str, turns: list[Turn], setting: Setting, continuation: int) -> Sample:
    context, question, reference = _parts(turns, setting)
    ends = setting.ends(reference)
    if len(ends) > continuation:
        reference = reference[: ends[continuation - 1]]
    return Sample(name, context, question, reference, rendered=True)


def _parts(turns: list[Turn], setting: Setting) -> tuple[str, str, str]:
    """(turns before the last, header of the last, text of the last) as the template writes them."""
    last = turns[-1]["content"]
    marked = setting.render([*turns[:-1], {"role": "assistant", "content": PLACEHOLDER}])
    head = marked.partition(PLACEHOLDER)[0]
    whole = setting.render(turns)
    shown = next((text for text in (last, last.strip()) if whole.startswith(head + text)), None)
    if shown is None:
        raise BadInput("ppl/oasst: the chat template alters the model's last turn; use --template none")
    context = setting.render(turns[:-1])
    if not (head.startswith(context) and len(context) < len(head)):
        context = head  # the prompt's last token becomes the question
    if not setting.chat and head.endswith(" "):  # the space belongs to the answer's first word
        head, shown = head[:-1], " " + shown
    return context, head[len(context) :], shown


@register_task("ppl/text", source="kvbench")
@dataclass(frozen=True)
class RunningText(Perplexity):
    """Perplexity of a text's continuation: windows of `length` tokens, then `continuation` more.

    The text is tokenised once and windows do not overlap; they begin and end where its tokens do. A
    window alone may have a few tokens more or less (its beginning, a BOS): its end moves until the
    prompt has `length` tokens, or nearly, where one character takes several tokens. Never in a chat
    template: running text is no user's turn. What is left at the end of the text is not used.

    Source: the usual sliding evaluation of language models, without overlap.
    """

    data = "--data FILE.txt or .jsonl with a text column, else Python's own reference"
    template = "none"

    length: int = param(512, "ours: within a 135M model's reach")
    continuation: int = param(128, "ours: as ppl/oasst")

    def __post_init__(self) -> None:
        if self.length < 2 or self.continuation < 1:
            raise BadInput(
                f"ppl/text: length={self.length}, continuation={self.continuation}: tokens, length from 2 "
                "and continuation from 1"
            )

    def check(self, data: str | None) -> None:
        if data is not None:
            read_text(data)

    def samples(self, setting: Setting) -> Samples:
        text = filler() if setting.data is None else read_text(setting.data)
        name = "Python's own reference" if setting.data is None else f"text {setting.data.rpartition('/')[2]}"
        ends = [0, *setting.ends(text)]
        two = ends[min(2, len(ends) - 1)]
        front = max(0, setting.count(Sample("", text[:two], "", "")) - 2)  # a BOS
        made: list[Sample] = []
        start = 0
        while len(made) != setting.limit:
            stop, one = self._window(text, ends, start, start + self.length - front, setting)
            if stop >= len(ends):
                break
            made.append(one)
            start = stop
        if not made:
            raise BadInput(
                f"ppl/text: the text has {len(ends) - 1} tokens, a window takes "
                f"{self.length + self.continuation}; lower length or continuation, or give a longer text"
            )
        return Samples(made, name, fingerprint(text))

    def _window(
        self, text: str, ends: list[int], start: int, middle: int, setting: Setting
    ) -> tuple[int, Sample]:
        """(token after it, the window that begins with token `start`). middle: first guess of its border."""
        tried: list[tuple[int, int, Sample]] = []
        for _ in range(4):
            middle = _whole(ends, middle)
            stop = _whole(ends, middle + self.continuation)
            if stop >= len(ends):
                return stop, Sample("", "", "", "")
            context, reference = text[ends[start] : ends[middle]], text[ends[middle] : ends[stop]]
            one = Sample(str(start), context, "", reference)
            missing = self.length - setting.count(one)
            tried.append((abs(missing), stop, one))
            if not missing:
                break
            middle = max(start + 1, middle + missing)
        return min(tried, key=lambda found: found[0])[1:]


def _whole(ends: list[int], index: int) -> int:
    """The index of the last token that ends with the same character."""
    while index + 1 < len(ends) and ends[index + 1] == ends[index]:
        index += 1
    return index
