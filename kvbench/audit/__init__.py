"""Is it true, and what does it cost? Checks of policies and run folders, repetition, speed.

In: a policy's name, or a run folder. Out: findings, a report of what differs, rows of times.
May import: everything but cli.
"""
