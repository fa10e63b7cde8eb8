"""How each policy is drawn: one colour and one marker per policy, the same in every figure of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import to_rgb

# distinguishable with the common colour blindnesses, and dark enough for lines on white
PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#332288", "#999933",
    "#117733", "#aa4499", "#661100",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
GREY = "#808080"
LOWER, UPPER = ":", "-."  # line styles of the brackets
BOUND_MARKERS = {UPPER: "+", LOWER: "x"}  # where a bracket is a single point
NEAR = 0.15  # two colours closer than this (distance in the RGB cube) count as one


@dataclass(frozen=True)
class Style:
    """color: of line, band and marker. line: matplotlib line style. width: in points."""

    color: str
    line: str
    marker: str
    width: float = 1.8
    bracket: bool = False


def assign_styles(specs: Iterable[str], declared: Mapping[str, Mapping[str, Any]]) -> dict[str, Style]:
    """A style for each policy spec.

    declared: the manifest's section, {spec: {"color", "dashed", "bracket"}}. Attention-based
    policies are dashed; brackets (bounds on what a policy can do) are thin and grey. A colour that
    is missing, or taken by another spec of the run, is derived from the spec's own hash.
    """
    found: dict[str, Style] = {}
    colors: list[str] = []
    markers: list[str] = []
    every = sorted({*specs, *declared}, key=lambda spec: (len(spec), spec))  # the plain policy chooses first
    own = [spec for spec in every if declared.get(spec, {}).get("color")]
    for spec in [*own, *(spec for spec in every if spec not in own)]:
        asked = declared.get(spec, {})
        if spec == "full":
            found[spec] = Style("#000000", "-", "", 1.4)
        elif asked.get("bracket"):
            found[spec] = Style(GREY, LOWER if asked["bracket"] == "lower" else UPPER, "", 1.2, bracket=True)
        else:
            color = asked.get("color")
            if not color or any(_near(color, other) for other in colors):
                color = _pick(PALETTE, spec, colors)
            marker = _pick(MARKERS, spec, markers)
            colors.append(color)
            markers.append(marker)
            found[spec] = Style(color, "--" if asked.get("dashed") else "-", marker)
    return found


def _pick(choices: Sequence[str], spec: str, taken: Sequence[str]) -> str:
    """The spec's own choice, or the next one that is free; when none is left, its own again."""
    start = int(hashlib.sha256(spec.encode("utf-8", "surrogatepass")).hexdigest(), 16) % len(choices)
    order = [*choices[start:], *choices[:start]]
    same = _near if choices is PALETTE else str.__eq__
    return next((item for item in order if not any(same(item, other) for other in taken)), order[0])


def _near(one: str, other: str) -> bool:
    pairs = zip(to_rgb(one), to_rgb(other), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5 < NEAR
