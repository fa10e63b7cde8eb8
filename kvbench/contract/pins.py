"""Tokens that are always kept, by original position."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import BadInput


@dataclass(frozen=True)
class Pins:
    """Tokens that are always kept: the first and the last ones, by original position.

    first: number of sinks (tokens); last: size of the window (tokens).
    """

    first: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < 0:
            raise BadInput(f"pins {self.first},{self.last}: both numbers must be 0 or more")

    @property
    def total(self) -> int:
        return self.first + self.last


def parse_pins(text: str) -> Pins | None:
    """`native` -> None (each policy's own), `none` -> no pins, `4,16` -> those for every policy."""
    if text == "native":
        return None
    if text == "none":
        return Pins()
    parts = text.split(",")
    if len(parts) != 2 or not all(re.fullmatch("[0-9]{1,18}", part.strip()) for part in parts):
        raise BadInput(f"--pins '{text}': write native, none, or FIRST,LAST as in 4,16")
    return Pins(int(parts[0]), int(parts[1]))
