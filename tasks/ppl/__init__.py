"""Perplexity of a continuation, given a compacted context: dialogues (ppl/oasst) and running text (ppl/text).

Nothing is generated. The engine teacher-forces the reference; nll and ppl are its numbers.
"""
