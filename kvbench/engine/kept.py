"""What cells keep of a sample: the positions, for someone who wants to look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..contract.cell import Cell
from ..contract.task import Sample
from ..model.lm import LoadedModel
from ..model.prompt import Prompt
from .answer import AnswerRequest
from .bind import bind_policies
from .evaluate import evaluate_full
from .order import keep


@torch.inference_mode()
def kept_positions(
    lm: LoadedModel, sample: Sample, prompt: Prompt, cells: Sequence[Cell], key: int
) -> Iterator[tuple[Cell, Tensor]]:
    """Every cell of the prefill schedule with the positions it keeps, (full_layer, kv_head, kept) int64.

    key: of the sample's random draws, as in `evaluate`. Cells whose policy fails are left out.
    """
    cells = [cell for cell in cells if cell.policy is not None and cell.schedule.chunk is None]
    request = AnswerRequest(lm, prompt, sample)
    with lm.rotation.whole(request.tokens):
        bound = bind_policies(lm, (cell.ranker.policy for cell in cells))
        _, context = evaluate_full(request, bound, cells, key)
    for cell in cells:
        if context is not None and (0, cell.ranker) in context.rankings.found:
            yield cell, keep(context.rankings.found[0, cell.ranker].order, cell.budget or 0)
