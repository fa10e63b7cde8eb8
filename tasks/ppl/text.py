"""ppl/text: running text, as a continuation of itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.contract.data import filler
from kvbench.contract.identity import fingerprint
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Sample, Samples, Setting
from kvbench.errors import BadInput

from ..ruler.text import read_text
from .base import Perplexity


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
