"""RULER's 13 subtasks, generated here to RULER's specification (arXiv:2404.06654, NVIDIA/RULER).

    base.py    what all share: exact lengths, scoring, provenance
    fill.py    the search for the amount of haystack that fills a length
    text.py    words, keys, values, noise, essays
    niah.py    the eight needle tasks    vt.py     variable tracking
    words.py   common and frequent words qa.py     questions with distractor documents

The prompts are RULER's; what differs is in each docstring, and common to all: lengths are filled to
98% instead of in coarse steps, no text appears under the names of RULER's essays, and no model-specific
prompt frame is used but the tokenizer's own chat template.
"""
