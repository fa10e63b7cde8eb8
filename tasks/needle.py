"""Needle in a haystack, the quickest task: RULER's niah_single_1 under a short name.

    A special magic number is hidden within the following text. Make sure to memorize it. ...
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    One of the special magic numbers for brave-otter is: 4127735.
    The grass is green. ...
    What is the special magic number for brave-otter mentioned in the provided text? The special ...

The quirk that matters: the haystack repeats one line, so a policy may drop nearly all of it freely.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.contract.registry import register_task

from .ruler.niah import SOURCE, Single1


@register_task("needle", source=SOURCE)
@dataclass(frozen=True)
class Needle(Single1):
    """Find one number in repeated text, at an exact length in tokens: RULER's niah_single_1.

    length: tokens of the prompt (template included) plus max_new_tokens; every sample uses 95 to 100%
    of it. Sample i depends on seed and i only. The needle stands before a line drawn uniformly.
    Reference: a space, the number, a full stop: what RULER's answer prefix asks for.

    Raises BadInput when the length has no room for the template and one line of haystack.
    Source: RULER, arXiv:2404.06654 (format and scoring of NVIDIA/RULER, also in lm-eval).
    Differs: the question is withheld by default (RULER's prompts end in the question, so a policy
    that looks at the last tokens would know what is asked; `--question seen` is RULER's protocol).
    16 new tokens instead of 128: the answer needs 8. Keys come from our own word lists.
    """

    question = "withheld"
