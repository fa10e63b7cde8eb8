"""What is broken on purpose, and which tests must notice: `make mutants`, `python -m tests.mutants --list`.

Each mutation replaces one piece of source text in a copy of the repository and runs the tests that are named
for it. A mutation that survives is a law that nobody watches.
"""
