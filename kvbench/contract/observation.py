"""What a policy sees of one layer when its cached tokens are scored.

Everything is lazy. Shared work (window attention, streamed attention sums) is computed once per layer,
however many policies ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import PluginError
from .attention_sums import attention_rows, streamed_sums
from .draws import draw_key, uniform_at
from .layer_parts import LayerParts
from .need import Need
from .output_projection import OutputProjection
from .query_moments import QueryMoments, streamed_moments
from .rotary import Rotary, RotaryTables
from .shared_work import SharedWork, compute_once, version_of


class _UndeclaredTensor:
    """Placeholder for keys or values that a policy did not declare; any use raises PluginError."""

    def __init__(self, need: Need) -> None:
        self._need = need

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PluginError(f"{self._need} was read but not declared in `needs`")

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [value for value in args if isinstance(value, cls)]
        what = f"{found[0]._need}" if found else "keys or values"
        raise PluginError(f"{what} was read but not declared in `needs`")

    __getitem__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __neg__ = __matmul__ = __pow__ = _refuse


UNDECLARED = {need: _UndeclaredTensor(need) for need in (Need.KEYS, Need.VALUES)}


@dataclass(frozen=True)
class ProbeLayer:
    """A policy's n extra tokens in one layer, after RoPE: queries (batch, query_head, n, dim), keys
    (batch, kv_head, n, dim)."""

    queries: torch.Tensor
    keys: torch.Tensor


@dataclass
class Observation:
    """One layer as a policy sees it. Slots are in ascending original position; rows of the batch are kept
    sets with equally many slots.

    layer, n_layers: index of this layer; number of layers. full_index: index among the evictable layers
    (those with full attention). keys, values: (batch, kv_head, slot, dim) as cached (keys after RoPE and
    QK-norm), in the model's dtype. positions: (batch, kv_head, slot) int64, original positions, unchanged
    by earlier evictions. new: number of tokens in this chunk; they are the last `new` slots. seen: tokens
    read so far, evicted ones included. scaling: the model's factor on attention logits.

    What is computed from other signals needs only its own Need: attention none of the keys, for example.
    """

    layer: int
    n_layers: int
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    new: int
    seen: int
    scaling: float
    _draw: int
    _queries: torch.Tensor
    _hidden: torch.Tensor | None = None
    _future: Callable[[], torch.Tensor] | None = None
    _probe: ProbeLayer | None = None
    _parts: LayerParts | None = None
    _question: int | None = None
    _second: torch.Tensor | None = None
    full_index: int = 0
    needs: frozenset[Need] = frozenset(Need)
    _shared: SharedWork = field(default_factory=SharedWork)
    _sharing: Callable[[SharedWork, Any, Callable[[], torch.Tensor]], torch.Tensor] = compute_once
    _whole: Observation | None = None

    def limited_to(self, needs: frozenset[Need]) -> Observation:
        """This observation restricted to the declared `needs`; shared work stays shared."""
        shown = {**self.__dict__, "needs": needs, "_whole": self._whole or self}
        for name, need in (("keys", Need.KEYS), ("values", Need.VALUES)):
            if need not in needs:
                shown[name] = UNDECLARED[need]
        return Observation(**shown)

    def written(self, before: Mapping[str, int]) -> list[str]:
        """What was written in place since `versions` gave `before`."""
        found = [name for name, version in self.versions().items() if version != before[name]]
        return found + self._shared.written()

    def versions(self) -> dict[str, int]:
        """The versions of what the cache and other policies use, too; the rest is handed out as copies."""
        whole = self._whole or self
        parts = {"keys": whole.keys, "values": whole.values, "positions": self.positions}
        return {name: version_of(tensor) for name, tensor in parts.items()}

    @property
    def _all_keys(self) -> torch.Tensor:
        """Keys for shared work; a policy may use its results without declaring KEYS."""
        return (self._whole or self).keys

    @property
    def _all_values(self) -> torch.Tensor:
        return (self._whole or self).values

    @property
    def slots(self) -> int:
        return self.positions.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.positions.shape[1]

    def window_queries(self, window: int) -> torch.Tensor:
        """Queries of the last min(window, new) tokens, after RoPE: (batch, query_head, w, dim)."""
        self._require(Need.WINDOW_QUERIES)
        return self._queries[:, :, -window:].clone()

    def window_attention(self, window: int) -> torch.Tensor:
        """Attention of the last min(window, new) tokens over all slots, causal inside the window.

        (batch, query_head, w, slot) float32; the softmax runs over every slot, so rows sum to 1.
        """
        self._require(Need.WINDOW_QUERIES)
        return self._once(("window", window), lambda: self._compute_window(window))

    def _compute_window(self, window: int) -> torch.Tensor:
        queries = self._queries[:, :, -window:]
        return attention_rows(queries, self._all_keys, self.scaling, self.slots - queries.shape[2])

    @property
    def attention_sums(self) -> torch.Tensor:
        """Attention received from all queries of this chunk: (batch, query_head, slot) float32."""
        self._require(Need.ATTENTION_SUMS)
        offset = self.slots - self.new
        return self._once(
            "sums", lambda: streamed_sums(self._queries, self._all_keys, self.scaling, offset, "sum")
        )

    @property
    def hidden_states(self) -> torch.Tensor:
        """Inputs of the attention module for this chunk: (batch, new, d_model)."""
        self._require(Need.HIDDEN_STATES)
        if self._hidden is None:
            raise PluginError("hidden states were not recorded for this layer")
        return self._hidden.clone()

    @property
    def future_attention(self) -> torch.Tensor:
        """KVP's u: attention from question and reference answer to each slot, in the full cache.

        (batch, kv_head, slot) float32: sum over future tokens of the maximum over the group's query heads.
        """
        self._require(Need.FUTURE)
        if self._future is None:
            raise PluginError("future attention is not known in this run")
        future = self._future()  # (1, kv_head, context position)
        return future.expand(self.positions.shape[0], -1, -1).gather(2, self.positions)

    @property
    def probe_attention(self) -> torch.Tensor:
        """Attention from the policy's extra tokens to every slot: (batch, query_head, n, slot) float32.

        The softmax runs over the slots and, causally, over the extra tokens. Only the columns of slots
        are returned, so rows sum to less than 1.
        """
        self._require(Need.PROBE)
        if self._probe is None:
            raise PluginError("no extra tokens were read in this layer")
        return self._once("probe", self._compute_probe)

    def _compute_probe(self) -> torch.Tensor:
        assert self._probe is not None
        keys = torch.cat([self._all_keys, self._probe.keys], 2)
        return attention_rows(self._probe.queries, keys, self.scaling, self.slots)[..., : self.slots]

    @property
    def second_attention(self) -> torch.Tensor:
        """Attention that the policy's second pass pays to every slot, reduced over what was read: (batch,
        query_head, slot) float32; 0 for slots that it did not ask for."""
        self._require(Need.SECOND_PASS)
        if self._second is None:
            raise PluginError("no second pass was read in this run")
        return self._second.clone()

    def rotary(self, start: int, stop: int) -> RotaryTables:
        """The model's rotation of positions start .. stop - 1, which need not have been read: float32."""
        self._require(Need.ROTARY)
        return self._rotation.read(start, stop, self.positions.device)

    @property
    def unrotated_keys(self) -> torch.Tensor:
        """Keys before RoPE, after QK-norm where the model has one: (batch, kv_head, slot, dim) float32."""
        self._require(Need.UNROTATED_KEYS)
        return self._once("unrotated keys", self._compute_unrotated)

    def _compute_unrotated(self) -> torch.Tensor:
        tables = self._rotation.read(0, self.seen, self.positions.device)
        return tables.at(self.positions).unrotate(self._all_keys)

    def query_moments(self, skip: int = 0) -> QueryMoments:
        """Mean and covariance of this chunk's queries before RoPE, per query head, in float32.

        Of the newest chunk only: in a chunked run, not of the prompt. skip: queries at the first `skip`
        positions of the prompt are left out; zeros when none is left.
        """
        self._require(Need.QUERY_MOMENTS)
        found = self._once(("query moments", skip), lambda: self._compute_moments(skip))
        return QueryMoments(found[:, :, 0], found[:, :, 1:])

    def _compute_moments(self, skip: int) -> torch.Tensor:
        start = min(max(skip, self.seen - self.new), self.seen)
        tables = self._rotation.read(start, self.seen, self.positions.device)
        return streamed_moments(self._queries[:, :, self._queries.shape[2] - (self.seen - start) :], tables)

    @property
    def _rotation(self) -> Rotary:
        if self._parts is None or self._parts.rotary is None:
            raise PluginError("the model's rotation is not known in this run")
        return self._parts.rotary

    @property
    def output_norms(self) -> torch.Tensor:
        """||W_O^h v||_2 of every value: (batch, query_head, slot) float32."""
        return self._project("output norms", lambda output: output.norms(self._all_values))

    @property
    def output_sums(self) -> torch.Tensor:
        """||W_O^h v||_1 of every value: (batch, query_head, slot) float32."""
        return self._project("output sums", lambda output: output.sums(self._all_values))

    @property
    def output_gram(self) -> torch.Tensor:
        """W_O^h^T W_O^h, so that v^T G v is ||W_O^h v||^2: (query_head, dim, dim) float32."""
        return self._project("output gram", lambda output: output.gram.clone())

    def _project(self, name: str, compute: Callable[[OutputProjection], torch.Tensor]) -> torch.Tensor:
        self._require(Need.OUTPUT_WEIGHTS)
        output = None if self._parts is None else self._parts.output
        if output is None:
            raise PluginError("the model's output projection is not known in this run")
        return self._once(name, lambda: compute(output))

    @property
    def question_tokens(self) -> int:
        """How many of the last slots are the question and what comes before the answer; 0 while it is
        withheld, or not read yet."""
        self._require(Need.QUESTION)
        if self._question is None:
            raise PluginError("the length of the question is not known in this run")
        return self._question

    def uniform(self) -> torch.Tensor:
        """One persistent uniform draw per token, KV head and layer: (batch, kv_head, slot) float32."""
        self._require(Need.RANDOM)
        return uniform_at(draw_key(self._draw, self.layer), self.positions)

    def by_group(self, per_query_head: torch.Tensor) -> torch.Tensor:
        """(batch, query_head, ...) -> (batch, kv_head, group, ...)."""
        batch, heads = per_query_head.shape[:2]
        return per_query_head.view(batch, self.kv_heads, heads // self.kv_heads, *per_query_head.shape[2:])

    def _require(self, need: Need) -> None:
        if need not in self.needs:
            raise PluginError(f"{need} was read but not declared in `needs`")
        if need in (Need.WINDOW_QUERIES, Need.QUERY_MOMENTS) and self._queries.shape[2] == 0:
            raise PluginError(
                "the queries of the chunk are gone once its future is known or extra tokens are read"
            )

    def _once(self, name: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._sharing(self._shared, name, compute)
