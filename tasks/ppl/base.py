"""What tasks of perplexity share."""

from __future__ import annotations

from kvbench.contract.task import Answer, Sample, Task


class Perplexity(Task):
    """Base: nothing is answered, only the reference is measured."""

    metric = "ppl"
    takes_data = True
    question = "withheld"

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        return {}
