"""FINCH: what the question attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("finch", source="arXiv:2408.00167")
@dataclass(frozen=True)
class Finch(Policy):
    """Ranks the question first, then tokens by the mean attention of the question, of each row by its length.

    With a row of attention for each of the w tokens of the question, times the number of slots before it:
    score = mean over the rows, then over the group.
    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2408.00167 (TACL 2024); NVIDIA/kvpress `finch_press.py`.
    Differs: the ranking alone: kept keys stay rotated by their own positions (FINCH and kvpress re-rotate
    them), and the context is not read in pieces with the question behind each. The question is what the
    prompt has behind the context, up to the answer. Where it is withheld, or not read yet in a chunked
    run, the method has no answer and its rows fail: use `--question seen`.
    """

    needs = frozenset({Need.WINDOW_QUERIES, Need.QUESTION})
    ranking = "the question, then by descending attention of the question"
    repeated = "not defined: the question comes with the last chunk"
    exactness = "official code"
    parity = "kvpress"
    color = "#DBA13A"

    normalize: bool = param(True, "kvpress: rows times the number of slots that they see")

    def score(self, seen: Observation) -> torch.Tensor:
        asked = min(seen.question_tokens, seen.new)
        if asked == 0:
            raise BadInput(
                "it ranks by the question, which it has not seen: use --question seen, in one chunk"
            )
        rows = seen.window_attention(asked)
        if self.normalize:
            rows = rows * torch.arange(seen.slots - asked, seen.slots, device=rows.device)[:, None]
        score = seen.by_group(rows.mean(2)).mean(2)
        question = seen.positions >= seen.seen - seen.question_tokens
        return torch.where(question, score.amax(-1, keepdim=True) + 1, score)
