"""Offline learning: record traces, train policies on them, measure rankings without a model.

In: tasks and a model, or a folder of traces. Out: traces, weights, rows of eviction error.
May import: study and what it may import.
"""

from ..engine.order import rank as rank
from ..study.progress import progress as progress
