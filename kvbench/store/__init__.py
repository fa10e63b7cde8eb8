"""Run folders on disk: a manifest that says how numbers were made, and one row per cell and sample.

In: rows. Out: the same rows, later, as dicts or as a pandas frame.
May import: contract.
"""
