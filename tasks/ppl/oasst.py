"""ppl/oasst: the last answer of a dialogue, in the model's own chat template."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbench.contract.data import check, rows
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import PLACEHOLDER, Sample, Samples, Setting
from kvbench.errors import BadInput

from .base import Perplexity
from .trees import OASST, Dialogue, Turn, dialogues, half

FILLED = 0.75  # share of the length below which a joined dialogue is refused


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
