"""What a cell would have measured if a near-tie had fallen the other way.

Another kind of processor adds up in another order, so two tokens whose scores are equal up to rounding may
change places at the cut, and the cell keeps another one. In: one cell and one sample. Out: the near-ties at
its cut, each with the measurement of the cell that keeps the other token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..contract.cell import Cell
from ..contract.task import Sample
from ..model.lm import LoadedModel
from ..model.prompt import Prompt
from .answer import AnswerRequest
from .bind import BoundPolicies, bind_policies
from .evaluate import evaluate_batch, evaluate_full
from .measure import Failure, Measurement
from .ranking import Ranking, Rankings

NEAR = 1e-4  # relative margin: hidden states of deep layers differ by about as much between processors
MOST = 24  # near-ties that are tried, the closest first


@dataclass(frozen=True)
class NearTie:
    """The last token kept and the first one evicted, by position, and how far apart their scores are.

    margin: relative to the larger of the two. full_layer: index among the evicted layers.
    """

    layer: int
    full_layer: int
    kv_head: int
    kept: int
    evicted: int
    margin: float

    def __str__(self) -> str:
        return (
            f"layer {self.layer}, KV head {self.kv_head}: position {self.kept} kept, {self.evicted} evicted, "
            f"margin {self.margin:.0e}"
        )


def find_near_ties(ranking: Ranking, cell: Cell, layers: tuple[int, ...]) -> list[NearTie]:
    """Near-ties at the cut of a ranking whose slots are positions, the closest first.

    layers: the model's index of each evicted layer. None where only pins are kept, or everything.
    """
    budget = cell.budget or 0
    if budget <= cell.pins.total or budget >= ranking.order.shape[-1]:
        return []
    slots = ranking.order[..., budget - 1 : budget + 1]
    scores = ranking.score.gather(-1, slots).double()  # (full_layer, kv_head, 2)
    margins = scores.diff(dim=-1).abs().squeeze(-1) / scores.abs().amax(-1).clamp_min(1e-300)
    found = []
    for i, head in (margins < NEAR).nonzero().tolist():
        kept, evicted = slots[i, head].tolist()
        found.append(NearTie(layers[i], i, head, kept, evicted, margins[i, head].item()))
    return sorted(found, key=lambda tie: tie.margin)[:MOST]


@torch.inference_mode()
def evaluate_near_ties(
    lm: LoadedModel, sample: Sample, prompt: Prompt, cell: Cell, key: int
) -> Iterator[tuple[NearTie, Measurement, Measurement]]:
    """Every near-tie at the cut of a cell of the prefill schedule, with what the cell measures when it falls
    the other way, and the full cache's measurement. key: of the sample's random draws, as in `evaluate`.
    """
    if cell.policy is None or cell.schedule.kind != "prefill":
        return
    request = AnswerRequest(lm, prompt, sample)
    with lm.rotation.whole(request.tokens):
        yield from _flip_each(request, bind_policies(lm, [cell.policy]), cell, key)


def _flip_each(
    request: AnswerRequest, bound: BoundPolicies, cell: Cell, key: int
) -> Iterator[tuple[NearTie, Measurement, Measurement]]:
    full, context = evaluate_full(request, bound, [cell], key)
    place = (0, cell.ranker)
    if context is None or place not in context.rankings.found:
        return
    ranking = context.rankings.found[place]
    for tie in find_near_ties(ranking, cell, request.lm.geometry.full_layers):
        order = ranking.order.clone()
        cut = slice((cell.budget or 0) - 1, (cell.budget or 0) + 1)
        order[tie.full_layer, tie.kv_head, cut] = order[tie.full_layer, tie.kv_head, cut].flip(0)
        other = replace(context, rankings=Rankings({place: replace(ranking, order=order)}))
        measured = evaluate_batch(other, [cell])[cell]
        if not isinstance(measured, Failure):
            yield tie, measured, full
