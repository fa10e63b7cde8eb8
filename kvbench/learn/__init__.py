"""Offline learning: record traces, train policies on them, measure rankings without a model.

In: tasks and a model, or a folder of traces. Out: traces, weights, rows of eviction error.
May import: study and what it may import.
"""
