"""Run folders on disk: a manifest that says how numbers were made, and one row per cell and sample.

In: rows (see `row.Row`). Out: the same rows, later, one by one or as a pandas frame.
May import: contract.
"""
