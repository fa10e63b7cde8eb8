"""`kvbench speed`: time, memory and operations of every stage of eviction.

In: policies and context lengths. Out: rows of times.
May import: as audit.
"""
