"""Compactor: tokens with unusual keys, and tokens that their neighbours attend to in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput
from kvbench.policies.leverage import leverage_scores


@register("compactor", source="arXiv:2507.08143")
@dataclass(frozen=True)
class Compactor(Policy):
    """Ranks tokens by leverage of keys before RoPE plus attention inside tiles, without a causal mask.

    Both parts over the slots between the pins. Attention: softmax of q.k (no factor) of each `tile` queries
    over their own keys, summed over queries, mean over the group, times ||v||, mean of 3 neighbours. score =
    blend * z(leverage) + z(attention), each minus its mean and by its deviation over a layer's KV heads.
    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2507.08143; NVIDIA/kvpress `compactor_press.py` and the presses that it joins.
    Differs: `blend` is fixed (kvpress' default, the compression ratio, is a budget); the last tile has no
    padding; the sketch is that of `leverage`. Chunked runs, where kept slots join the first tile, are ours.
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.UNROTATED_KEYS, Need.WINDOW_QUERIES})
    ranking = "the pins, then by descending sum of both parts"
    repeated = "kept tokens are attended by the first tile of the newest chunk"
    exactness = "official code"
    parity = "kvpress"
    color = "#E377C2"

    first: int = param(8, "kvpress")
    last: int = param(4, "kvpress")
    tile: int = param(256, "kvpress")
    sketch: int = param(48, "kvpress")
    blend: float = param(0.35, "kvpress' constant; its default is the compression ratio")

    def __post_init__(self) -> None:
        if min(self.first, self.last, self.sketch, self.blend) < 0 or self.tile < 1:
            raise BadInput("compactor: use a tile of 1 or more, and 0 or more of the other parameters")

    @property
    def pins(self) -> Pins:
        return Pins(first=self.first, last=self.last)

    def score(self, seen: Observation) -> torch.Tensor:
        inside = (seen.positions >= self.first) & (seen.positions < seen.seen - self.last)
        unusual = leverage_scores(seen.unrotated_keys, inside, seen.layer, self.sketch)
        attended = self._attend(seen, inside) * seen.values.float().norm(dim=-1) * inside
        attended = torch.nn.functional.avg_pool1d(attended, 3, stride=1, padding=1)
        score = self.blend * _z(unusual, inside) + _z(attended, inside)
        return torch.where(inside, score, score.amax(-1, keepdim=True) + 1)

    def _attend(self, seen: Observation, inside: torch.Tensor) -> torch.Tensor:
        """Column sums of attention in tiles of the chunk between the pins, mean over the group."""
        kept, total = seen.slots - seen.new, torch.zeros(inside.shape, device=inside.device)
        start = min(max(self.first - (seen.seen - seen.new), 0), seen.new)
        stop = max(seen.new - self.last, start)
        queries, keys = seen.by_group(seen.window_queries(seen.new)).float(), seen.keys.float()
        for begin in range(start, stop, self.tile):
            end = min(begin + self.tile, stop)
            columns = slice(0 if begin == start else kept + begin, kept + end)
            logits = queries[:, :, :, begin:end] @ keys[:, :, None, columns].transpose(-1, -2)
            logits.masked_fill_(~inside[:, :, None, None, columns], float("-inf"))
            total[:, :, columns] += logits.softmax(-1).sum(3).mean(2)
        return total


def _z(x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    count = inside.sum((1, 2), keepdim=True)
    centred = (x - (x * inside).sum((1, 2), keepdim=True) / count.clamp_min(1)) * inside
    deviation = (centred.square().sum((1, 2), keepdim=True) / (count - 1).clamp_min(1)).sqrt()
    return centred / deviation.clamp_min(1e-6)
