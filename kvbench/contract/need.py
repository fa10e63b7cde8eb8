"""What a policy may declare that it reads."""

from __future__ import annotations

from enum import Enum


class Need(Enum):
    """What a policy looks at. Reading anything it did not declare is an error."""

    KEYS = "keys"
    VALUES = "values"
    WINDOW_QUERIES = "queries of the last tokens"
    ATTENTION_SUMS = "attention of all queries of the chunk"
    HIDDEN_STATES = "hidden states"
    RANDOM = "random numbers"
    FUTURE = "future attention"
    PROBE = "attention of extra tokens"

    @property
    def is_attention(self) -> bool:
        """True for signals that need queries: such policies are drawn dashed."""
        return self in (Need.WINDOW_QUERIES, Need.ATTENTION_SUMS, Need.FUTURE, Need.PROBE)
