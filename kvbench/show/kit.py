"""What a policy package needs to draw a figure of its own, with one import line.

Declare it as a `kvbench.show.figures.FigureKind`, which imports nothing that draws.
"""

from ..stats.bootstrap import Estimate, Floats, bootstrap_intervals, pool_rows
from ..stats.panels import shorten
from .canvas import FONT, GRID, WIDTH, add_axes, add_heading, new_figure, round_numbers, save, use_fonts
from .chart import BUDGET
from .curves import name_ticks
from .figures import REFERENCE, RUNS, TRACES, FigureKind, Request, inputs
from .style import GREY, Style, assign_styles

__all__ = [
    "BUDGET", "FONT", "GREY", "GRID", "REFERENCE", "RUNS", "TRACES", "WIDTH", "Estimate", "FigureKind",
    "Floats", "Request", "Style", "add_axes", "add_heading", "assign_styles", "bootstrap_intervals", "inputs",
    "name_ticks", "new_figure", "pool_rows", "round_numbers", "save", "shorten", "use_fonts",
]  # fmt: skip
