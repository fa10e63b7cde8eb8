"""Greedy writing of many rows at once, in lockstep, from where their predictions leave what was read.

In: a cache and what every row predicts for the tokens behind it. Out: each row's tokens.

A row whose predictions agree with tokens that were already read (the reference, or the full cache's answer
as a draft) takes those over; it joins the lockstep at the token where it differs. That is what the row
would have written on its own, so a draft saves time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..contract.task import Sample
from ..model.lm import LoadedModel
from .cache import Cache
from .forward import read
from .tree import Tree

LOOK_EVERY = {"cpu": 1}  # steps between two looks at what was written; elsewhere a look waits for the device
LOOK_SELDOM = 8


@dataclass
class Line:
    """What one row has written.

    row: in the batch. tokens: all of them, the one that ends the answer included. path: the nodes of the
    tree that hold them in the cache; the last token of an unfinished line is not in the cache yet.
    """

    row: int
    tokens: list[int]
    path: list[int]
    ended: bool = False

    def check(self, lm: LoadedModel, sample: Sample, start: int) -> None:
        """Look for the end of the answer from token `start` on, and cut what comes after it."""
        for index in range(start, len(self.tokens)):
            full = index + 1 == sample.max_new_tokens
            stopped = full or self.tokens[index] in lm.eos_ids
            if not stopped and sample.stop:
                text = lm.tokenizer.decode(self.tokens[: index + 1], skip_special_tokens=True)
                stopped = any(stop in text for stop in sample.stop)
            if stopped:
                self.ended = True
                del self.tokens[index + 1 :]
                return

    def text(self, lm: LoadedModel, sample: Sample) -> str:
        """The answer without the token that ended it, up to the first stop string."""
        tokens = self.tokens
        if tokens and tokens[-1] in lm.eos_ids:
            tokens = tokens[:-1]
        text = lm.tokenizer.decode(tokens, skip_special_tokens=True)
        for stop in sample.stop:
            text = text.split(stop, 1)[0]
        return text


@dataclass(frozen=True)
class Lookahead:
    """What has been read behind the context of every row.

    start: position of the question. predicted: per row the likeliest token after each node of the tree, from
    the root on.
    """

    tree: Tree
    start: int
    predicted: list[list[int]]


def write(lm: LoadedModel, cache: Cache, sample: Sample, known: Lookahead, follow: bool) -> list[Line]:
    """Write the answer of every row.

    cache: rows that hold the context, and behind their end the tree's tokens, which will be overwritten.
    follow: take over what was read as far as a row agrees with it; else nothing but the question.
    """
    if sample.max_new_tokens == 0:
        return [Line(row, [], [], True) for row in range(cache.rows)]
    tree = known.tree
    lines = [_follow(lm, sample, tree, row, nodes, follow) for row, nodes in enumerate(known.predicted)]
    going = [line for line in lines if not line.ended]
    if going:
        question = tree.root + 1
        _Lockstep(lm, cache, sample, question, going).run(known.start + question)
    return lines


def _follow(
    lm: LoadedModel, sample: Sample, tree: Tree, row: int, predicted: list[int], follow: bool
) -> Line:
    """What a row writes as long as it has been read, and the first token that has not."""
    line = Line(row, [predicted[0]], [])
    line.check(lm, sample, 0)
    node = tree.root
    while follow and not line.ended and line.tokens[-1] in tree.children[node]:
        node = tree.children[node][line.tokens[-1]]
        line.path.append(node)
        line.tokens.append(predicted[node - tree.root])
        line.check(lm, sample, len(line.tokens) - 1)
    return line


class _Lockstep:
    """Rows that write together: at any step all of them write the same token of their answers.

    lines: by bucket, then by the length of what they took over, so that at any step those that write are the
    first rows of their bucket. tokens: (row, token) on the device.
    """

    def __init__(
        self, lm: LoadedModel, cache: Cache, sample: Sample, question: int, lines: Sequence[Line]
    ) -> None:
        self.lm, self.sample, self.question = lm, sample, question
        self.lines = sorted(lines, key=lambda line: (cache.bucket_index(line.row), len(line.path)))
        rows = [line.row for line in self.lines]
        self.cache = cache if rows == list(range(cache.rows)) else cache.take_rows(rows)
        self.cache.move([line.path for line in self.lines], question)
        self.cache.reserve(question + sample.max_new_tokens)
        known = [line.tokens + [0] * (sample.max_new_tokens - len(line.tokens)) for line in self.lines]
        self.tokens = torch.tensor(known, device=lm.device)

    def run(self, position: int) -> None:
        """Write until every line has ended. position: of the answers' first token."""
        every = LOOK_EVERY.get(self.lm.device.type, LOOK_SELDOM)
        last = self.sample.max_new_tokens - 1
        step, looked = 0, 0
        reading: list[int] = []
        while waiting := [len(line.path) for line in self.lines if not line.ended]:
            step = max(step, min(waiting))
            if (now := self._writing(step)) != reading:
                reading, part = now, self._part(now, step)
                index = torch.tensor(now, device=self.lm.device)
            logits = read(self.lm, part, self.tokens[index, step, None], position + step)
            step += 1
            self.tokens[index, step] = logits[:, -1].argmax(-1)
            if step - looked >= every or step == last:
                looked = step
                self._look(step)
                if self._leave():
                    reading = []

    def _writing(self, step: int) -> list[int]:
        """The lines to read at a step, by index; a bucket in which all have ended is not read."""
        writing: list[int] = []
        for bucket in self.cache.buckets:
            started = [i for i in bucket.rows if len(self.lines[i].path) <= step]
            if not all(self.lines[i].ended for i in started):
                writing += started
        return writing

    def _part(self, lines: list[int], step: int) -> Cache:
        """The rows of these lines, with the question and the first `step` tokens; the tensors are shared."""
        counts = [sum(i in bucket.rows for i in lines) for bucket in self.cache.buckets]
        return self.cache.first_rows(counts, self.question + step)

    def _look(self, step: int) -> None:
        """See on the host what was written up to token `step`, and which answers have ended."""
        written = self.tokens[:, : step + 1].tolist()
        for line, tokens in zip(self.lines, written, strict=True):
            if not line.ended and len(line.path) < step:
                start = len(line.tokens)
                line.tokens = tokens
                line.check(self.lm, self.sample, start)

    def _leave(self) -> bool:
        """Rows that ended leave once half have."""
        stay = [i for i, line in enumerate(self.lines) if not line.ended]
        if not stay or 2 * len(stay) > len(self.lines):
            return False
        self.cache = self.cache.take_rows(stay)
        self.tokens = self.tokens[torch.tensor(stay, device=self.tokens.device)]
        self.lines = [self.lines[i] for i in stay]
        return True
