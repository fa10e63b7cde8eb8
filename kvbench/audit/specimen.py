"""Random layers on which a policy's contract is tried, from one slot upwards."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor, nn

from ..contract.draws import draw_key
from ..contract.observation import Observation, Probed
from ..contract.policy import TrainedFor

PROBED = 3  # extra tokens of a layer
DIM = 16  # head size, where the policy fits every model
PARTS = ("keys", "values", "queries", "hidden", "future", "probe", "key")  # what `observe` can replace
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
    keys and values are 0, so that norms and spreads are, too.
    """

    slots: int
    kv_heads: int
    group: int
    dtype: torch.dtype
    kind: Literal["plain", "gaps", "flat", "empty"] = "plain"
    dim: int = DIM

    def __str__(self) -> str:
        heads = "1 KV head" if self.kv_heads == 1 else f"{self.kv_heads} KV heads"
        slots = "1 slot" if self.slots == 1 else f"{self.slots} slots"
        group = "1 query head" if self.group == 1 else f"{self.group} query heads"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{slots}, {heads}, {group} each, {dtype} keys, {KINDS[self.kind]}"

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
            layer=1,
            n_layers=4,
            keys=keys.to(self.dtype).contiguous(),
            values=values.to(self.dtype).contiguous(),
            positions=positions,
            new=self.new,
            seen=seen,
            scaling=self.dim**-0.5,
            module=_copied(_attention(self.kv_heads, heads, self.dim, self.dtype)),
            key=draw_key("specimen", other == "key"),
            _queries=draw("queries", heads, self.new, self.dim).to(self.dtype),
            _hidden=draw("hidden", self.new, heads * self.dim).to(self.dtype),
            _future=lambda: future,
            _probe=Probed(
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
    for slots, kv_heads, group in itertools.product((1, 2, 5, 40, 300), heads, (1, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            yield Specimen(slots, kv_heads, group, dtype, dim=dim)
            if slots > 1 and kv_heads == heads[-1] and group > 1:  # the widest stand for the unusual ones
                for kind in ("gaps", "flat", "empty"):
                    yield Specimen(slots, kv_heads, group, dtype, kind, dim)


def few_specimens(trained: TrainedFor | None = None) -> Iterator[Specimen]:
    """The widest layer of each kind at a few sizes, for a test suite that tries a hundred policies."""
    dtypes = {1: torch.bfloat16, 2: torch.bfloat16, 5: torch.bfloat16, 300: torch.float32}
    found = [layer for layer in specimens(trained) if layer.dtype == dtypes.get(layer.slots)]
    yield from {(layer.slots, layer.kind): layer for layer in found}.values()  # the last one is the widest


# Drawing takes longer than most policies: what a layer is made of is drawn once, and copied.


@functools.cache
def _kept(row: int, head: int, kept: int) -> Tensor:
    return torch.randperm(3 * kept, generator=_generator("kept", row, head))[:kept].sort().values


def _generator(*parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(draw_key(*parts) & 0x7FFFFFFF)


@functools.cache
def _normal(parts: tuple[object, ...], shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=_generator(*parts))


@functools.cache
def _attention(kv_heads: int, heads: int, dim: int, dtype: torch.dtype) -> nn.Module:
    """A stand-in for an attention module: projections and sizes under transformers' names."""
    module = nn.Module()
    width = heads * dim
    for name, size in (("q_proj", width), ("k_proj", kv_heads * dim), ("v_proj", kv_heads * dim)):
        linear = nn.Linear(width, size, bias=False, device="meta").to_empty(device="cpu")
        linear.weight.data = (_normal((name, heads, kv_heads), (size, width)) * width**-0.5).to(dtype)
        module.add_module(name, linear)
    module.layer_idx, module.head_dim = 1, dim  # type: ignore[assignment]
    module.config = SimpleNamespace(  # type: ignore[assignment]
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim
    )
    return module


def _copied(module: nn.Module) -> nn.Module:
    """The same module with weights of its own: what writes into them spoils no other layer."""
    other = copy.copy(module)
    other._modules = {}
    for name, linear in module.named_children():
        twin = copy.copy(linear)
        twin._parameters = {"weight": nn.Parameter(linear.get_parameter("weight").detach().clone())}
        other.add_module(name, twin)
    return other
