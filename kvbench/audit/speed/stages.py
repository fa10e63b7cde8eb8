"""One prompt through the engine with a clock on every stage: prefill, scores, ranking, compaction, decoding.

The engine's own functions do the work. A prefill serves all policies; unlike in a run, each policy sees
every layer afresh, so that no policy is paid for by another one that shares its work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...contract.need import Need
from ...engine.attention import Layer
from ...engine.cache import Cache
from ...engine.forward import read
from ...engine.hidden import recorded_hidden
from ...engine.order import rank
from ...engine.probe import probe_tokens, read_embedded, validated_probe
from ...engine.ranking import Ranker, Ranking, Target
from ...engine.score import reason, validated_score
from ...engine.selection import evict
from ...errors import KvbenchError
from ...model.memory import can_reset, devices_of, peak_bytes, release, reset_peak, synchronise
from ...model.open import LoadedModel
from .flops import counted_flops, prefill_flops


@dataclass
class Span:
    """A stretch of work. seconds; peak: bytes, 0 where parts of a process cannot be told apart."""

    seconds: float = 0.0
    peak: int = 0

    def add(self, other: Span) -> None:
        self.seconds += other.seconds
        self.peak = max(self.peak, other.peak)


class Clock:
    """Times and peaks of stretches of work on some devices."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.devices = devices
        self.resets = can_reset(devices)

    def start(self) -> float:
        """A new peak begins; the time now that all earlier work is done."""
        synchronise(self.devices)
        if self.resets:
            reset_peak(self.devices)
        return time.perf_counter()

    def stop(self, started: float) -> Span:
        synchronise(self.devices)
        seconds = time.perf_counter() - started
        return Span(seconds, peak_bytes(self.devices) if self.resets else 0)

    @contextmanager
    def timed(self, into: Span) -> Iterator[None]:
        """Add what happens inside to a span."""
        started = self.start()
        yield
        into.add(self.stop(started))


@dataclass
class Stages:
    """What one policy took, or why it failed.

    score: seconds of each full-attention layer. rank: ordering all layers' slots. compact: cutting to the
    budget and gathering. decode: one token after another on the compacted cache. score_flops: counted
    in the matrix products of one layer, times the layers. kept: slots per KV head and layer.
    """

    score: list[float] = field(default_factory=list)
    scoring: Span = field(default_factory=Span)
    rank: Span = field(default_factory=Span)
    compact: Span = field(default_factory=Span)
    decode: Span = field(default_factory=Span)
    score_flops: int = 0
    kv_bytes: int = 0
    kept: int = 0
    failed: str = ""

    @property
    def peak(self) -> int:
        return max(span.peak for span in (self.scoring, self.rank, self.compact, self.decode))


@dataclass
class Passed:
    """One pass. prefill: of all policies. full: the cache without eviction, which only decodes."""

    prefill: Span
    full: Stages
    policies: dict[Ranker, Stages]


class _Timed:
    """Observer that scores and ranks every layer for every policy, each stage by the clock.

    forward: the time of the pass without its policies.
    """

    def __init__(self, clock: Clock, ranking: Ranking, stages: dict[Ranker, Stages]) -> None:
        self.clock = clock
        self.ranking = ranking
        self.stages = stages
        self.forward = Span()
        self.since = clock.start()

    def __call__(self, layer: Layer) -> None:
        if layer.index not in self.ranking.lm.geometry.full_layers:
            return
        self.forward.add(self.clock.stop(self.since))
        for ranker, stages in self.stages.items():
            if not stages.failed:
                self._time(layer, ranker, stages)
        self.since = self.clock.start()

    def end(self) -> None:
        """The pass is over."""
        self.forward.add(self.clock.stop(self.since))

    def _time(self, layer: Layer, ranker: Ranker, stages: Stages) -> None:
        seen = self.ranking.observation(layer, 0)
        span = Span()
        try:
            with self.clock.timed(span):
                score = validated_score(ranker.policy, seen)
        except KvbenchError as error:
            stages.failed = reason(ranker.policy, error)
            return
        stages.score.append(span.seconds)
        stages.scoring.add(span)
        with self.clock.timed(stages.rank):
            order = rank(score, seen.positions, ranker.pins, seen.seen)[0]
        self.ranking.orders.setdefault((0, ranker), []).append(order)
        if len(stages.score) == 1:
            again = replace(seen, _shared={})
            one = counted_flops(lambda: validated_score(ranker.policy, again))
            stages.score_flops = one * len(self.ranking.lm.geometry.full_layers)


@torch.inference_mode()
def run_stages(lm: LoadedModel, ids: Tensor, rankers: list[Ranker], budget: int, new_tokens: int) -> Passed:
    """Read ids (token,), then let every policy score, rank, compact to the budget and decode.

    new_tokens: decoded one by one, greedily, from each compacted cache and from the full one.
    """
    release()
    clock = Clock(devices_of(lm.model))
    n = ids.shape[0]
    extra = max([new_tokens, *(probe_tokens(ranker.policy) for ranker in rankers)])
    cache = Cache.empty(lm.geometry.layers, n + extra)
    ranking = Ranking(lm, [rankers], key=0, seen=n)
    plain = {ranker: Stages() for ranker in rankers if Need.PROBE not in ranker.policy.needs}
    timed = _Timed(clock, ranking, plain)
    hidden = any(Need.HIDDEN_STATES in ranker.policy.needs for ranker in rankers)
    with recorded_hidden(lm.model, ranking.hidden) if hidden else nullcontext():
        read(lm, cache, ids, 0, observer=timed)
    timed.end()
    probed = {ranker: Stages() for ranker in rankers if ranker not in plain}
    for ranker, stages in probed.items():
        _probe(clock, cache, replace(ranking, new=n), ranker, stages)
    done = Passed(timed.forward, Stages(), {ranker: (plain | probed)[ranker] for ranker in rankers})
    _decode(lm, clock, cache, done.full, n, new_tokens)
    for ranker, stages in done.policies.items():
        if stages.failed:
            continue
        with clock.timed(stages.compact):
            compacted, _ = evict(lm, cache, [Target(ranker, budget)], [0], ranking, new_tokens)
        _decode(lm, clock, compacted, stages, n, new_tokens)
        del compacted
    return done


def _probe(clock: Clock, cache: Cache, ranking: Ranking, ranker: Ranker, stages: Stages) -> None:
    """Score for a policy with extra tokens: reading them is a part of its scoring, shared by all layers."""
    lm, n = ranking.lm, ranking.seen
    try:
        tokens = validated_probe(ranker.policy, lm, 0)  # at n they may be beyond the model: only time counts
    except KvbenchError as error:
        stages.failed = reason(ranker.policy, error)
        return
    mark = cache.mark()
    timed = _Timed(clock, replace(ranking, probed=len(tokens)), {ranker: stages})
    read_embedded(lm, cache, tokens, n, timed)
    timed.end()
    cache.rewind(mark)
    stages.scoring.add(timed.forward)
    stages.score = [seconds + timed.forward.seconds / len(stages.score) for seconds in stages.score]
    stages.score_flops += prefill_flops(lm, n + len(tokens)) - prefill_flops(lm, n)


def _decode(lm: LoadedModel, clock: Clock, cache: Cache, stages: Stages, n: int, new_tokens: int) -> None:
    """Decode from a cache of one row, at positions n, n + 1, ...; the cache is left as it was."""
    bucket = cache.buckets[0]
    held = [bucket.view(layer)[:2] for layer in range(lm.geometry.layers)]
    stages.kv_bytes = sum(tensor.nbytes for pair in held for tensor in pair)
    stages.kept = bucket.filled[lm.geometry.full_layers[0]]
    mark = cache.mark()
    token = torch.zeros(1, 1, dtype=torch.int64, device=lm.device)
    with clock.timed(stages.decode):
        for step in range(new_tokens):
            token = read(lm, cache, token, n + step).argmax(-1)
    cache.rewind(mark)
