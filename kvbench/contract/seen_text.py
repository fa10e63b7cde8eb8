"""Which text learned weights have seen, and how much of a prompt it is.

In: token ids of the training texts, as the model that the weights fit reads them. Out: hashes of their runs
of 8 tokens, small enough to lie in the weights file, and the share of a prompt's runs that are among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RUN = 8  # tokens: shorter runs are common phrases, longer ones miss texts that were cut or edited
MOST = 1 << 17  # hashes kept, 4 bytes each


@dataclass(frozen=True, eq=False)
class SeenText:
    """Hashes of runs of tokens.

    hashes: (n,) uint32, ascending. every: a power of two; runs whose hash it does not divide are left out, of
    the text and of what is compared with it, so that a large text stays within MOST hashes.
    """

    hashes: Any
    every: int = 1

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> SeenText:
        """What is to be remembered of some texts, each given as token ids."""
        found = np.unique(np.concatenate([np.empty(0, np.uint32), *map(hash_runs, texts)]))
        every = 1
        while len(found) > MOST:
            every *= 2
            found = found[found % every == 0]
        return cls(found, every)

    def share(self, ids: Sequence[int]) -> float | None:
        """Share of the runs of a prompt (token ids) that the training texts hold, 0 to 1.

        None where the prompt has no run to compare.
        """
        runs = hash_runs(ids)
        runs = runs[runs % self.every == 0]
        return float(np.isin(runs, self.hashes).mean()) if len(runs) else None


def hash_runs(ids: Sequence[int]) -> Any:
    """A uint32 hash of every run of 8 token ids, (n - 7,); empty for a shorter text."""
    tokens = np.asarray(ids, dtype=np.uint64)
    if len(tokens) < RUN:
        return np.empty(0, np.uint32)
    odd = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(RUN, odd))
        windows = np.lib.stride_tricks.sliding_window_view(tokens + np.uint64(1), RUN)
        mixed = (windows * powers).sum(1, dtype=np.uint64)
        mixed ^= mixed >> np.uint64(31)  # low bits of a sum of products depend on low bits only
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)
