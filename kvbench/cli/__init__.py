"""The command line: one file a group of commands.

In: options. Out: text and exit codes.
May import: everything; heavy modules only inside commands.
"""
