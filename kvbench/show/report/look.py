"""Colours and markers of `kvbench.show.style` on a page that is light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib.colors import to_hex, to_rgb
from matplotlib.markers import MarkerStyle

from ..chart import display_name
from ..style import BOUND_MARKERS, Style

DARK = (0.078, 0.086, 0.102)  # the dark page
CONTRAST = 4.5  # of lines on the dark page, as text should have
DASHES = {"-": "", "--": "6 3.5", ":": "1.5 3", "-.": "7 3 1.5 3"}
LINES = {
    "|": "M0-.5V.5", "+": "M-.5 0H.5M0-.5V.5", "x": "M-.4-.4L.4 .4M-.4 .4L.4-.4",
    "o": "M-.5 0a.5 .5 0 1 0 1 0a.5 .5 0 1 0-1 0Z",
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """How one label is drawn. key: its number on this page. shape: the marker's outline, 1 wide. bound: no
    policy but a bracket or the full cache; its curve has no markers.
    """

    key: int
    label: str
    text: str
    light: str
    dark: str
    dash: str
    shape: str
    width: float
    bound: bool


def assign_looks(labels: Sequence[str], styles: Mapping[str, Style]) -> dict[str, Look]:
    """A look for every label, in this order."""
    return {label: _look(key, label, styles[label]) for key, label in enumerate(labels)}


def _look(key: int, label: str, style: Style) -> Look:
    shape = outline(style.marker or BOUND_MARKERS.get(style.line, "|"))
    colors = style.color.lower(), brighten(style.color)
    return Look(
        key, label, display_name(label), *colors, DASHES[style.line], shape, style.width, not style.marker
    )


@cache
def outline(marker: str) -> str:
    """A marker of matplotlib as an SVG path around (0, 0)."""
    if marker in LINES:
        return LINES[marker]
    style = MarkerStyle(marker)
    points: Any
    (points,) = style.get_path().transformed(style.get_transform()).to_polygons()
    return "M" + "L".join(f"{round(x, 3):g} {round(-y, 3):g}" for x, y in points[:-1]) + "Z"


def brighten(color: str) -> str:
    """The colour, mixed with white until it is bright enough for the dark page."""
    red, green, blue = to_rgb(color)
    for white in (step / 20 for step in range(20)):
        mixed = red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white
        if (luminance(mixed) + 0.05) / (luminance(DARK) + 0.05) >= CONTRAST:
            return to_hex(mixed)
    return "#ffffff"


def luminance(color: Sequence[float]) -> float:
    """Relative luminance of an sRGB colour (WCAG 2)."""
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
