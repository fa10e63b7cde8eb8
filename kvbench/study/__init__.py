"""`kvbench run`: from a configuration to stored rows, on one machine or many.

In: a RunConfig. Out: rows in a run folder, and a RunResult.
May import: contract, model, engine, store, stats.
"""
