"""The loop: read a chunk, let every policy rank, evict down to the budgets, read the next chunk.

Compress-after-prefill is the case of one chunk. Rows of the cache are the different kept sets; cells
(policy, budget, pins) that keep the same pairs share a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .attention import Layer, Observer, Pass
from .cache import Cache, Kept
from .errors import KvbenchError, UnsupportedModel
from .models import LoadedModel
from .observe import Observation, Probed, scrambled
from .policy import Need, Pins, Policy
from .probe import probe_tokens, rank_probed
from .rank import keep, rank
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


@dataclass(frozen=True)
class Tokens:
    """New tokens that do not simply follow one another.

    positions: (new,) original positions. visible: see `Pass`. wanted: (logits,) which tokens' logits to
    compute.
    """

    positions: Tensor
    visible: Tensor | None
    wanted: Tensor


def read(
    lm: LoadedModel, cache: Cache, ids: Tensor, start: int, keep_logits: int = 1,
    observer: Observer | None = None,
) -> Tensor:  # fmt: skip
    """Read new tokens into every row of the cache, at positions start, start + 1, ...

    ids: (new,) the same for all rows, or (row, new). Returns logits (row, keep_logits, vocabulary) of
    the last tokens. Raises UnsupportedModel when a layer's attention did not come through us.
    """
    new = ids.shape[-1]
    positions = torch.arange(start, start + new, device=lm.device)
    wanted = torch.arange(new - keep_logits, new, device=lm.device)
    return read_tokens(lm, cache, ids, Tokens(positions, None, wanted), observer)


def read_tokens(
    lm: LoadedModel, cache: Cache, ids: Tensor, tokens: Tokens, observer: Observer | None = None
) -> Tensor:
    """`read` for tokens with positions of their own: logits (row, wanted, vocabulary)."""
    rows = cache.rows
    kv_pass = Pass(cache, tokens.positions, tokens.visible, observer)
    output = lm.model(
        input_ids=ids.expand(rows, -1),
        position_ids=tokens.positions.expand(rows, -1),
        use_cache=False,
        logits_to_keep=tokens.wanted,  # by index: a slice of the end would not be contiguous
        kv_pass=kv_pass,
    )
    if kv_pass.layers_seen != lm.geometry.layers:
        raise UnsupportedModel(
            f"{lm.name}: {kv_pass.layers_seen} of {lm.geometry.layers} layers use the attention interface; "
            "the others keep a state that cannot be evicted"
        )
    return output.logits


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


def read_and_rank(
    lm: LoadedModel, cache: Cache, ids: Tensor, start: int, ranking: Ranking, observer: Observer | None = None
) -> float:
    """Read one chunk and rank every row, layer by layer, while its queries exist.

    Policies with extra tokens are ranked afterwards, when those are read. observer: also looks at the
    layers of the chunk. Returns the seconds of the reading alone.
    """
    needs_hidden = any(
        Need.HIDDEN_STATES in ranker.policy.needs for row in ranking.wanted for ranker in row
    )  # fmt: skip
    recording = recorded_hidden(lm.model, ranking.hidden) if needs_hidden else nullcontext()
    with recording:
        started, scoring = time.perf_counter(), sum(ranking.seconds.values())
        read(lm, cache, ids, start, observer=_both(ranking.without_probes(), observer))
        seconds = time.perf_counter() - started - (sum(ranking.seconds.values()) - scoring)
    rank_probed(lm, cache, ids.shape[0], ranking)
    ranking.settle()
    return seconds


def _both(first: Observer, second: Observer | None) -> Observer:
    def look(layer: Layer) -> None:
        first(layer)
        if second is not None:
            second(layer)

    return look


def rank_stored(cache: Cache, ranking: Ranking, modules: dict[int, tuple[Any, float]]) -> None:
    """Rank from keys and values alone, after the prefill: for policies that look at the future."""
    for bucket in cache.buckets:
        for index, (module, scaling) in modules.items():
            keys = bucket.view(index)[0]
            no_queries = keys.new_empty(keys.shape[0], keys.shape[1], 0, keys.shape[3])
            ranking(Layer(index, bucket, no_queries, scaling, module))
    ranking.settle()


@contextmanager
def recorded_hidden(model: Any, into: dict[int, Tensor]) -> Iterator[None]:
    """Record what each attention module receives, for the duration of one forward."""

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        into[module.layer_idx] = args[0] if args else kwargs["hidden_states"]

    handles = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def evict(
    lm: LoadedModel, cache: Cache, targets: list[Target], row_of: list[int], ranking: Ranking, room: int
) -> tuple[Cache, list[int]]:
    """Cut every target's row down to its budget.

    row_of: each target's row in `cache`. Returns the compacted cache and each target's new row;
    targets that keep the same slots of the same row share one.
    """
    kept: list[Kept] = []
    known: dict[Any, int] = {}
    index = []
    names = _names(lm, cache, targets, row_of, ranking)
    for target, row, name in zip(targets, row_of, names, strict=True):
        if name not in known:
            known[name] = len(kept)
            kept.append(Kept(row, _all_layers(lm, cache, row, _kept_slots(lm, cache, target, row, ranking))))
        index.append(known[name])
    compacted, place = cache.compact(kept, room)
    return compacted, [place[i] for i in index]


def _names(
    lm: LoadedModel, cache: Cache, targets: list[Target], row_of: list[int], ranking: Ranking
) -> list[tuple[int, ...]]:
    """A name for what each target keeps: equal names, equal slots of one row.

    Every (layer, KV head, slot) has 128 random bits, and a kept set has the sum of its members', in two
    numbers. The sums of all budgets of a ranking are its running sums, and the host reads all of them once.
    """
    sums: dict[tuple[int, Ranker], Tensor] = {}
    asked: list[Tensor] = []
    names: list[tuple[int, ...]] = [(row,) for row in row_of]
    cut = []
    for i, (target, row) in enumerate(zip(targets, row_of, strict=True)):
        if _fits(lm, cache, target, row):
            continue
        if (row, target.ranker) not in sums:
            sums[row, target.ranker] = _running_sums(ranking.order(row, target.ranker))
        asked.append(sums[row, target.ranker][:, target.budget - 1])
        cut.append(i)
    if asked:
        for i, name in zip(cut, torch.stack(asked).tolist(), strict=True):
            names[i] = (row_of[i], *name)
    return names


def _running_sums(order: Tensor) -> Tensor:
    """(layer, kv_head, slot) slots -> (2, slot) int64: sums of random bits, over the slots ranked so far."""
    numbers = torch.arange(order.numel(), device=order.device).view(order.shape)
    bits = torch.stack([scrambled(numbers + 1), scrambled(numbers + 1 + order.numel())])
    return bits.gather(-1, order.expand_as(bits)).sum((1, 2)).cumsum(-1)


def _fits(lm: LoadedModel, cache: Cache, target: Target, row: int) -> bool:
    """Whether all of a row's slots stay."""
    bucket, _ = cache.locate(row)
    return bucket.filled[lm.geometry.full_layers[0]] <= target.budget


def _kept_slots(
    lm: LoadedModel, cache: Cache, target: Target, row: int, ranking: Ranking
) -> Tensor | None:  # fmt: skip
    """Slots to keep in the full-attention layers (full_layer, kv_head, kept); None when all stay."""
    if _fits(lm, cache, target, row):
        return None
    return keep(ranking.order(row, target.ranker), target.budget)


def _all_layers(lm: LoadedModel, cache: Cache, row: int, slots: Tensor | None) -> list[Tensor]:
    """Kept slots of every layer: sliding-window layers, and rows within budget, keep everything."""
    bucket, _ = cache.locate(row)
    kept = []
    full = {layer: i for i, layer in enumerate(lm.geometry.full_layers)}
    for layer in range(lm.geometry.layers):
        if slots is not None and layer in full:
            kept.append(slots[full[layer]])
            continue
        everything = torch.arange(bucket.filled[layer], device=lm.device)
        kept.append(everything.expand(lm.geometry.kv_heads, -1))
    return kept


@dataclass
class Compressed:
    """Caches after the context was read and evicted.

    cache: rows of kept sets. row_of: target -> row. failed: target -> what its policy did wrong.
    seconds: ranker -> scoring time. peak: target -> most slots held at any moment, chunk included.
    """

    cache: Cache
    row_of: dict[Target, int]
    failed: dict[Target, str]
    seconds: dict[Ranker, float]
    peak: dict[Target, int]


def compress_in_chunks(
    lm: LoadedModel, ids: Tensor, chunk: int, targets: list[Target], ranking_key: int,
    future: dict[int, Tensor] | None, room: int,
) -> Compressed:  # fmt: skip
    """The chunked schedule: after each chunk, rank kept + new tokens and evict down to the budget.

    A chunk attends to what was kept and to itself; only then is anything evicted.
    """
    cache = Cache.empty(lm.geometry.layers, min(chunk, ids.shape[0]) + room)
    done = Compressed(cache, dict.fromkeys(targets, 0), {}, {}, dict.fromkeys(targets, 0))
    extra = {target: probe_tokens(target.ranker.policy) for target in targets}
    for start in range(0, ids.shape[0], chunk):
        piece = ids[start : start + chunk]
        alive = list(done.row_of)
        wanted: list[list[Ranker]] = [[] for _ in range(done.cache.rows)]
        for target in alive:
            if target.ranker not in wanted[done.row_of[target]]:
                wanted[done.row_of[target]].append(target.ranker)
        ranking = Ranking(lm, wanted, ranking_key, start + piece.shape[0], future, seconds=done.seconds)
        read_and_rank(lm, done.cache, piece, start, ranking)
        for target in alive:
            if reason := ranking.failed.get((done.row_of[target], target.ranker)):
                done.failed[target] = reason
        alive = [target for target in alive if target not in done.failed]
        if not alive:  # every policy failed, so nobody waits for the rest of the context
            done.row_of = {}
            break
        for target in alive:
            held = done.cache.locate(done.row_of[target])[0].filled[lm.geometry.full_layers[0]]
            done.peak[target] = max(done.peak[target], held + extra[target])
        last = start + chunk >= ids.shape[0]
        rows = [done.row_of[target] for target in alive]
        done.cache, rows = evict(
            lm, done.cache, alive, rows, ranking, room if last else chunk + max(extra.values())
        )
        done.row_of = dict(zip(alive, rows, strict=True))
    return done
