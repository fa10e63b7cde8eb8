"""Tables from what `kvbench eviction-error` printed on held-out traces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvbench.show.words import probability

from .places import REFERENCE, lines_of


def heldout(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`heldout kvp|judgeq [QUANTITY]`: printed outputs of `kvbench eviction-error`, one line a setting.

    QUANTITY: "eviction cost" (default), or "missed mass" at 32 pairs. policies: which columns. pins, split:
    which settings; else all.
    """
    folder, quantity = REFERENCE / parts[0], (parts[1:] or ["eviction cost"])[0]
    body, names = [], options["policies"].split(";")
    for pins in options.get("pins", "none;4-16").split(";"):
        for split in options.get("split", "boundary;uniform").split(";"):
            for data in ("ruler", "dialogue"):
                text = (folder / f"heldout-{data}-{split}-pins-{pins}.txt").read_text(encoding="utf-8")
                cells = dict(re.findall(r"^ (\S+) +(\S+ \[\S+\])", after(text, f": {quantity} "), re.M))
                body.append([pins.replace("-", ","), split, data, *(cells[name] for name in names)])
    return lines_of(["pins for all", "split", "data", *map(column_name, names)], body, 3)


def column_name(name: str) -> str:
    return name.replace("weights=", "").replace(".safetensors", "")


def after(text: str, mark: str) -> str:
    """The block of a printed output that begins with this title."""
    return text[text.index(mark) :].split("\n\n\n")[0]


PAIRS = {  # label: names on RULER-style traces and on dialogues
    "kvp, same data": ("kvp", "kvp:weights=dialogue"),
    "kvp, other data": ("kvp:weights=dialogue", "kvp"),
    "judgeq, other data": ("judgeq:weights=dialogue", "judgeq"),
    "judgeq, untrained": ("judgeq:weights=untrained.safetensors",) * 2,
    "judgeq, smoothed": ("judgeq:pooling=max", "judgeq:weights=dialogue,pooling=max"),
    "last 32 tokens": ("snapkv:kernel=1",) * 2,
    "snapkv": ("snapkv",) * 2,
    "tova": ("tova",) * 2,
}


def heldout_paired(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`heldout_paired PINS SPLIT`: eviction cost minus that of JudgeQ trained on the same data, per trace."""
    pins, split = parts
    columns = []
    for data in ("ruler", "dialogue"):
        file = REFERENCE / "judgeq" / f"heldout-{data}-{split}-pins-{pins.replace(',', '-')}.txt"
        table = file.read_text(encoding="utf-8").partition("paired over traces")[2].splitlines()[2:]
        columns.append({fields[0]: fields[1:] for fields in map(str.split, table) if fields})
    body = []
    for label, names in PAIRS.items():
        row = [label]
        for name, column in zip(names, columns, strict=True):
            mean, low, high, _, *wins, p = column[name]
            row += [f"{float(mean):+.3f} [{float(low):.3f},{float(high):.3f}]"]
            row += [f"{probability(float(p))}, {'/'.join(wins)}"]
        body.append(row)
    beside = "p, win/tie/loss"
    return lines_of(["policy", "RULER-style", beside, "dialogues", beside], body)
