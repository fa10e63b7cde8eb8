"""From rows to numbers with uncertainty: means, intervals, paired differences and tests.

In: a frame of rows. Out: a frame of aggregates or of comparisons.
May import: contract, store.
"""
