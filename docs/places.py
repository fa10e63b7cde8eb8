"""What the functions of blocks.py and figure_blocks.py share: where results lie, and Markdown lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

REFERENCE = Path(__file__).parents[1] / "results" / "reference"
Block = Callable[[Sequence[str], dict[str, str]], list[str]]  # (arguments, options) -> lines


def lines_of(header: Sequence[str], body: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A Markdown table, its first `left` columns to the left, numbers to the right."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return ["| " + " | ".join(row) + " |" for row in (header, rule, *body)]
