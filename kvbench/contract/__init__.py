"""What a policy, a task and a row are: the words that every other package uses.

In: nothing. Out: the base classes that contributors extend (Policy, Task), what they are shown
(Observation, Setting), how they are named and found (spec, registry), what is measured (metrics), and
what a result belongs to (cell, identity).
May import: kvbench.errors.
"""
