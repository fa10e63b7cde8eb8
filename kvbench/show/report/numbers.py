"""The numbers that a page shows, inside the page: for machines, and for `kvbench verify`."""

from __future__ import annotations

import json
import re
from typing import Any

import pandas as pd

from ...errors import BadInput
from ...store.manifest import shown_data
from ..table import json_lines

FIELDS = ["task", "policy", "budget", "metric", "mean", "lo", "hi", "n", "pins_mode", "config"]
OPEN, CLOSE = '<script type="application/json" id="numbers">', "</script>"
MARK = re.compile(r'<meta name="kvbench-data" content="([^"]*)">')


def write_lines(lines: pd.DataFrame) -> str:
    """Aggregated lines as JSON that can stand in a page: no text in it ends the element."""
    text = json_lines(lines[lines["n"] > 0][FIELDS])
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def mark(text: str) -> str:
    return shown_data(text.encode())


def read_lines(page: str) -> tuple[list[dict[str, Any]], bool]:
    """The lines in a page, and whether they have the hash that the page says. Raises: BadInput."""
    start = page.find(OPEN) + len(OPEN)
    found = MARK.search(page)
    try:
        text = page[start : page.index(CLOSE, start)]
        lines = json.loads(text)
    except ValueError as error:
        raise BadInput(f"not a page of kvbench ({error}): make one with kvbench report RUN") from error
    return lines, found is not None and found[1] == mark(text)
