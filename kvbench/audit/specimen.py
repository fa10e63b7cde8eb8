"""Random layers on which a policy's contract is tried, from one slot upwards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..contract.draws import draw_key
from ..contract.layer_parts import LayerParts
from ..contract.model_description import ModelDescription
from ..contract.observation import Observation, ProbeLayer
from ..contract.output_projection import OutputProjection
from ..contract.policy import TrainedFor
from ..contract.rotary import Rotary

PROBED = 3  # extra tokens of a layer
QUESTION = 6  # tokens of its question
DIM = 16  # head size, where the policy fits every model
PARTS = (
    "keys",
    "values",
    "queries",
    "hidden",
    "future",
    "probe",
    "second",
    "draw",
    "parts",
    "question",
)  # what `observe` can replace
KINDS: dict[str, str] = {
    "plain": "one chunk from position 0",
    "gaps": "kept slots with gaps, then a chunk",
    "flat": "all tokens alike",
    "empty": "all keys and values 0",
}


@dataclass(frozen=True)
class Specimen:
    """One kind of layer. group: query heads per KV head. slots: tokens in the cache.

    kind: "plain", one chunk; "gaps", slots kept from earlier chunks (each KV head its own) before
    the chunk; "flat", every slot holds the same key and value, as a repeated token can give; "empty",
    keys and values are 0, so that norms and spreads are, too. layers: evicted ones of its model, of which
    it is the first.
    """

    slots: int
    kv_heads: int
    group: int
    dtype: torch.dtype
    kind: Literal["plain", "gaps", "flat", "empty"] = "plain"
    dim: int = DIM
    layers: int = 2

    def __str__(self) -> str:
        heads = "1 KV head" if self.kv_heads == 1 else f"{self.kv_heads} KV heads"
        slots = "1 slot" if self.slots == 1 else f"{self.slots} slots"
        group = "1 query head" if self.group == 1 else f"{self.group} query heads"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{slots}, {heads}, {group} each, {dtype} keys, {KINDS[self.kind]}"

    @property
    def model(self) -> ModelDescription:
        """A model that the layer could be of: every second layer has full attention."""
        cpu, heads = torch.device("cpu"), self.kv_heads * self.group
        return ModelDescription(
            name="specimen",
            layers=2 * self.layers,
            evicted_layers=tuple(range(1, 2 * self.layers, 2)),
            query_heads=heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            width=heads * self.dim,
            devices=(cpu,) * self.layers,
            device=cpu,
            dtype=self.dtype,
        )

    @property
    def new(self) -> int:
        """Tokens of the last chunk: all slots, or the newer half where older ones were evicted."""
        return (self.slots + 1) // 2 if self.kind == "gaps" else self.slots

    def observe(self, rows: tuple[int, ...] = (0, 1), other: str = "") -> Observation:
        """The layer with the given rows of the batch. other: a part of PARTS drawn anew.

        Row r holds the same numbers in every batch, and a part's draw depends on no other part.
        """
        heads, kept = self.kv_heads * self.group, self.slots - self.new
        seen = 3 * kept + self.new
        state = (self.slots if self.kind != "flat" else 1, self.dim)
        size = 0.0 if self.kind == "empty" else 1.0

        def draw(part: str, *shape: int) -> Tensor:
            return torch.stack([_normal((part, row, part == other), shape) for row in rows])

        positions = torch.stack([self._positions(row, kept) for row in rows])
        keys = (size * draw("keys", self.kv_heads, *state)).expand(-1, -1, self.slots, -1)
        values = (size * draw("values", self.kv_heads, *state)).expand(-1, -1, self.slots, -1)
        future = draw("future", self.kv_heads, seen).abs()
        return Observation(
            layer=self.model.evicted_layers[0],
            n_layers=self.model.layers,
            keys=keys.to(self.dtype).contiguous(),
            values=values.to(self.dtype).contiguous(),
            positions=positions,
            new=self.new,
            seen=seen,
            scaling=self.dim**-0.5,
            _draw=draw_key("specimen", other == "draw"),
            _queries=draw("queries", heads, self.new, self.dim).to(self.dtype),
            _hidden=draw("hidden", self.new, heads * self.dim).to(self.dtype),
            _future=lambda: future,
            _parts=random_parts(self.dim, heads, other == "parts"),
            _question=min(self.new, QUESTION) if other != "question" else 1,
            _second=draw("second", heads, self.slots).abs(),
            _probe=ProbeLayer(
                draw("probe", heads, PROBED, self.dim).to(self.dtype),
                draw("probe", self.kv_heads, PROBED, self.dim).to(self.dtype),
            ),
        )

    def _positions(self, row: int, kept: int) -> Tensor:
        """(kv_head, slot): ascending, each KV head with its own gaps, then the chunk."""
        chosen = [_kept(row, head, kept) for head in range(self.kv_heads)]
        chunk = torch.arange(3 * kept, 3 * kept + self.new).expand(self.kv_heads, -1)
        return torch.cat([torch.stack(chosen), chunk], dim=1)


def specimens(trained: TrainedFor | None = None) -> Iterator[Specimen]:
    """All layers of the contract, smallest first. trained: the only geometry of a learned policy."""
    heads, dim = ((1, 3), DIM) if trained is None else ((trained.kv_heads,), trained.head_dim)
    layers = 2 if trained is None else trained.layers
    for slots, kv_heads, group in itertools.product((1, 2, 5, 40, 300), heads, (1, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            yield Specimen(slots, kv_heads, group, dtype, dim=dim, layers=layers)
            if slots > 1 and kv_heads == heads[-1] and group > 1:  # the widest stand for the unusual ones
                for kind in ("gaps", "flat", "empty"):
                    yield Specimen(slots, kv_heads, group, dtype, kind, dim, layers)


def few_specimens(trained: TrainedFor | None = None) -> Iterator[Specimen]:
    """The widest layer of each kind at a few sizes, for a test suite that tries a hundred policies."""
    dtypes = {1: torch.bfloat16, 2: torch.bfloat16, 5: torch.bfloat16, 300: torch.float32}
    found = [layer for layer in specimens(trained) if layer.dtype == dtypes.get(layer.slots)]
    yield from {(layer.slots, layer.kind): layer for layer in found}.values()  # the last one is the widest


# Drawing takes longer than most policies: what a layer is made of is drawn once, and copied.


@functools.cache
def random_parts(dim: int, heads: int, other: bool) -> LayerParts:
    """A rotation of half of each head, and random weights of the output projection."""
    speeds = 100.0 ** -torch.linspace(0, 1, dim // 4) / (2 if other else 1)

    def tables(start: int, stop: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(start, stop)[:, None] * speeds.repeat(2)
        return angles.cos(), angles.sin()

    weight = _normal(("weight", other), (heads * dim, heads * dim))
    return LayerParts(Rotary(dim, tables), OutputProjection(weight, heads))


@functools.cache
def _kept(row: int, head: int, kept: int) -> Tensor:
    return torch.randperm(3 * kept, generator=_generator("kept", row, head))[:kept].sort().values


def _generator(*parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(draw_key(*parts) & 0x7FFFFFFF)


@functools.cache
def _normal(parts: tuple[object, ...], shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=_generator(*parts))
