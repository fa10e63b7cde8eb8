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
    SECOND_PASS = "attention of a second pass"
    ROTARY = "rotary tables"
    UNROTATED_KEYS = "keys before rotation"
    QUERY_MOMENTS = "mean and covariance of queries"
    OUTPUT_WEIGHTS = "values through the output projection"
    QUESTION = "length of the question"

    @property
    def is_attention(self) -> bool:
        """True for signals that need queries: such policies are drawn dashed."""
        return self in _OF_QUERIES


_OF_QUERIES = (
    Need.WINDOW_QUERIES, Need.ATTENTION_SUMS, Need.QUERY_MOMENTS, Need.FUTURE, Need.PROBE, Need.SECOND_PASS,
)  # fmt: skip
