"""Tasks whose prompts, few-shot examples, choices, filters and metrics are lm-eval's own.

config.py reads a task's configuration, offline.py makes lm-eval's task object of it without network,
border.py marks where the context ends, base.py turns documents into samples and answers into metrics.
"""
