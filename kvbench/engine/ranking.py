"""Ranking while a pass is read: every policy scores every full-attention layer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..contract.need import Need
from ..contract.observation import Observation, Probed
from ..contract.pins import Pins
from ..contract.policy import Policy
from ..errors import KvbenchError
from ..model.open import LoadedModel
from .attention import Layer
from .order import rank
from .score import not_finite, reason, score_and_flag


@dataclass(frozen=True)
class Ranker:
    """A policy under pins: what makes a ranking. Budgets are cut from it later."""

    policy: Policy
    pins: Pins


@dataclass(frozen=True)
class Target:
    """What one cell asks of the loop: a ranking and how much of it to keep."""

    ranker: Ranker
    budget: int


@dataclass
class Ranking:
    """Observer that ranks each full-attention layer for the policies of each row.

    wanted: per row, the rankers to apply. key: of random draws. future: u per layer position, if known.
    orders: (row, ranker) -> per full layer (kv_head, slot). failed: same -> what the policy did wrong.
    seconds: ranker -> time spent in its score and sort, and in reading its extra tokens. probed: how many
    extra tokens the pass reads; they stand last, do not compete, and `new` tokens were read before them.
    flags: (row, ranker, layer, whether its score is finite, on the device), until `settle` reads them.
    """

    lm: LoadedModel
    wanted: list[list[Ranker]]
    key: int
    seen: int
    future: dict[int, Tensor] | None = None
    orders: dict[tuple[int, Ranker], list[Tensor]] = field(default_factory=dict)
    failed: dict[tuple[int, Ranker], str] = field(default_factory=dict)
    seconds: dict[Ranker, float] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    flags: list[tuple[int, Ranker, int, Tensor]] = field(default_factory=list)
    probed: int = 0
    new: int = 0
    _finished: dict[tuple[int, Ranker], Tensor] = field(default_factory=dict)

    def __call__(self, layer: Layer) -> None:
        if layer.index not in self.lm.geometry.full_layers:
            return
        for offset, row in enumerate(layer.bucket.rows):
            seen = self.observation(layer, offset)
            for ranker in self.wanted[row]:
                self._rank(row, ranker, seen)

    def observation(self, layer: Layer, offset: int) -> Observation:
        """What policies see of one full-attention layer in the bucket's row at `offset`."""
        stored = layer.bucket.view(layer.index)
        slots = stored[0].shape[2] - self.probed
        keys, values, positions = (tensor[:, :, :slots] for tensor in stored)
        hidden = self.hidden.get(layer.index)
        one = slice(offset, offset + 1)
        row = layer.bucket.rows[offset]
        return Observation(
            layer=layer.index,
            n_layers=self.lm.geometry.layers,
            full_index=self.lm.geometry.full_layers.index(layer.index),
            keys=keys[one],
            values=values[one],
            positions=positions[one],
            new=self.new if self.probed else layer.queries.shape[2],
            seen=self.seen,
            scaling=layer.scaling,
            module=layer.module,
            key=self.key,
            _queries=layer.queries[one, :, self.probed :],
            _hidden=None if hidden is None else hidden[row : row + 1],
            _future=None if self.future is None else _constant(self.future[layer.index]),
            _probe=Probed(layer.queries[one], stored[0][one, :, slots:]) if self.probed else None,
        )

    def _rank(self, row: int, ranker: Ranker, seen: Observation) -> None:
        if (row, ranker) in self.failed:
            return
        started = time.perf_counter()
        try:
            score, finite = score_and_flag(ranker.policy, seen)
        except KvbenchError as error:
            self.failed[row, ranker] = reason(ranker.policy, error)
            return
        self.flags.append((row, ranker, seen.layer, finite))
        order = rank(score, seen.positions, ranker.pins, seen.seen)
        self.orders.setdefault((row, ranker), []).append(order[0])
        spent = time.perf_counter() - started
        self.seconds[ranker] = self.seconds.get(ranker, 0.0) + spent

    def settle(self) -> None:
        """Read once what the devices know of all scores: a policy whose score is not finite has failed."""
        if not self.flags:
            return
        finite = torch.stack([flag.to(self.lm.device) for *_, flag in self.flags]).tolist()
        for (row, ranker, layer, _), fine in zip(reversed(self.flags), reversed(finite), strict=True):
            if not fine:  # the first layer has the last word
                self.failed[row, ranker] = not_finite(ranker.policy, layer)
        self.flags.clear()

    def without_probes(self) -> Ranking:
        """The same ranking, results included, for the rankers that read no extra tokens."""
        wanted = [[one for one in row if Need.PROBE not in one.policy.needs] for row in self.wanted]
        return replace(self, wanted=wanted)

    def order(self, row: int, ranker: Ranker) -> Tensor:
        """The finished ranking of a row: (full_layer, kv_head, slot), on the model's first device.

        Joined once, whatever the number of budgets that are cut from it.
        """
        if (row, ranker) not in self._finished:
            layers = [order.to(self.lm.device) for order in self.orders[row, ranker]]
            self._finished[row, ranker] = torch.stack(layers)
        return self._finished[row, ranker]


def _constant(value: Tensor) -> Any:
    return lambda: value
