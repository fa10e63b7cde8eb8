"""One prompt through the engine with a clock on every stage: prefill, scores, ranking, compaction, decoding.

The engine's own functions do the work. A prefill serves all policies; unlike in a run, each policy sees
every layer afresh, so that no policy is paid for by another one that shares its work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...contract.cell import Cell, Ranker
from ...contract.need import Need
from ...contract.second_pass import ContextText
from ...contract.shared_work import SharedWork
from ...engine.attention import Layer
from ...engine.bind import BoundPolicies, bind_policies, reason
from ...engine.cache import Cache
from ...engine.forward import read
from ...engine.hidden import recorded_hidden
from ...engine.observe import Moment, observe_rows
from ...engine.order import rank
from ...engine.passes import AFTERWARDS
from ...engine.probe import read_probe
from ...engine.ranking import Ranking, Rankings, RowRanker
from ...engine.score import validated_score
from ...engine.second_pass import rank_after_second_pass
from ...engine.selection import evict
from ...errors import KvbenchError
from ...model.lm import LoadedModel
from ...model.memory import can_reset, devices_of, peak_bytes, release, reset_peak, synchronise
from .flops import counted_flops, prefill_flops

QUESTION = 32  # of the last tokens, for policies that rank by the question


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
class PassTimes:
    """One pass. prefill: of all policies. full: the cache without eviction, which only decodes."""

    prefill: Span
    full: Stages
    policies: dict[Cell, Stages]


class _StageTimer:
    """Observer that scores and ranks every layer for every policy, each stage by the clock.

    forward: the time of the pass without its policies. hidden: see `recorded_hidden`. probe: extra tokens.
    """

    def __init__(
        self, clock: Clock, bound: BoundPolicies, moment: Moment, stages: dict[Ranker, Stages], probe: int = 0
    ) -> None:
        self.forward = Span()
        self.hidden: dict[int, Tensor] = {}
        self._clock = clock
        self._bound = bound
        self._moment = moment
        self._stages = stages
        self._probe = probe
        self._layers: dict[Ranker, list[tuple[Tensor, Tensor]]] = {ranker: [] for ranker in stages}
        self._since = clock.start()

    def __call__(self, layer: Layer) -> None:
        if layer.index not in self._bound.lm.geometry.full_layers:
            return
        self.forward.add(self._clock.stop(self._since))
        for ranker, stages in self._stages.items():
            if not stages.failed:
                self._time(layer, ranker, stages)
        self._since = self._clock.start()

    def finish(self) -> Rankings:
        """The pass is over."""
        self.forward.add(self._clock.stop(self._since))
        device = self._bound.lm.device
        found: dict[RowRanker, Ranking] = {}
        for ranker, stages in self._stages.items():
            if not stages.failed:
                parts = zip(*self._layers[ranker], strict=True)
                order, score = (torch.stack([one.to(device) for one in part]) for part in parts)
                found[0, ranker] = Ranking(order, score, stages.scoring.seconds + stages.rank.seconds)
        return Rankings(found)

    def _time(self, layer: Layer, ranker: Ranker, stages: Stages) -> None:
        geometry, policy = self._bound.lm.geometry, self._bound.policies[ranker.policy]
        hidden = self.hidden.get(layer.index)
        seen = observe_rows(self._bound, layer, (0,), self._moment, hidden, self._probe)
        span = Span()
        try:
            with self._clock.timed(span):
                score = validated_score(policy, seen)
        except KvbenchError as error:
            stages.failed = reason(policy, error)
            return
        stages.score.append(span.seconds)
        stages.scoring.add(span)
        with self._clock.timed(stages.rank):
            order = rank(score, seen.positions, ranker.pins, seen.seen)
        self._layers[ranker].append((order[0], score[0]))
        if len(stages.score) == 1:
            again = replace(seen, _shared=SharedWork())
            one = counted_flops(lambda: validated_score(policy, again))
            stages.score_flops = one * len(geometry.full_layers)


@torch.inference_mode()
def run_stages(lm: LoadedModel, ids: Tensor, cells: Sequence[Cell], new_tokens: int) -> PassTimes:
    """Read ids (token,), then let the policy of every cell score, rank, compact to its budget and decode.

    new_tokens: decoded one by one, greedily, from each compacted cache and from the full one.
    """
    with lm.rotation.whole(ids.shape[0] + new_tokens):
        return _run_stages(lm, ids, cells, new_tokens)


def _run_stages(lm: LoadedModel, ids: Tensor, cells: Sequence[Cell], new_tokens: int) -> PassTimes:
    release()
    clock = Clock(devices_of(lm.model))
    n = ids.shape[0]
    rankers = list(dict.fromkeys(cell.ranker for cell in cells))
    bound = bind_policies(lm, (ranker.policy for ranker in rankers))
    failures = bound.failures
    stages = {ranker: Stages(failed=failures.get(ranker.policy, "")) for ranker in rankers}
    extra = max([new_tokens, *(len(probe.tokens) for probe in bound.probes)])
    cache = Cache.empty(lm.geometry.layers, n + extra)
    moment = Moment(n, n, draw=0, question=min(QUESTION, n), text=_text(lm, ids))
    plain = {one: times for one, times in stages.items() if not one.policy.needs & AFTERWARDS}
    timer = _StageTimer(clock, bound, moment, plain)
    hidden = any(Need.HIDDEN_STATES in ranker.policy.needs for ranker in rankers)
    with recorded_hidden(lm, timer.hidden) if hidden else nullcontext():
        read(lm, cache, ids, 0, observer=timer)
    rankings = timer.finish()
    done = PassTimes(timer.forward, Stages(), {})
    for probe in bound.probes:
        for ranker in rankers:
            if ranker.policy in probe.policies:
                once = _StageTimer(clock, bound, moment, {ranker: stages[ranker]}, len(probe.tokens))
                rankings = rankings.joined(_time_probe(lm, cache, probe.tokens, n, once, stages[ranker]))
    for ranker in rankers:
        if Need.SECOND_PASS in ranker.policy.needs and not stages[ranker].failed:
            rankings = rankings.joined(_time_second_pass(clock, bound, cache, ranker, moment, stages[ranker]))
    _decode(lm, clock, cache, done.full, n, new_tokens)
    for cell in cells:
        times = done.policies[cell] = stages[cell.ranker]
        if times.failed:
            continue
        with clock.timed(times.compact):
            compacted, _ = evict(lm, cache, [cell], [0], rankings, new_tokens)
        _decode(lm, clock, compacted, times, n, new_tokens)
        del compacted
    return done


def _time_probe(
    lm: LoadedModel, cache: Cache, tokens: Tensor, n: int, timer: _StageTimer, stages: Stages
) -> Rankings:
    """Score for a policy with extra tokens: reading them is a part of its scoring, shared by all layers.

    At n they may be beyond the model's length: only the time counts.
    """
    read_probe(lm, cache, tokens, n, timer)
    rankings = timer.finish()
    if not stages.failed:
        stages.scoring.add(timer.forward)
        stages.score = [seconds + timer.forward.seconds / len(stages.score) for seconds in stages.score]
        stages.score_flops += prefill_flops(lm, n + len(tokens)) - prefill_flops(lm, n)
    return rankings


def _time_second_pass(
    clock: Clock, bound: BoundPolicies, cache: Cache, ranker: Ranker, moment: Moment, stages: Stages
) -> Rankings:
    """Score and rank for a policy with a second pass: all of it counts as scoring, shared by all layers."""
    with clock.timed(stages.scoring):
        found = rank_after_second_pass(bound, cache, [[ranker]], moment)
    stages.failed = found.failures.get((0, ranker), "")
    if not stages.failed:
        layers = len(bound.lm.geometry.full_layers)
        stages.score = [stages.scoring.seconds / layers] * layers
        stages.score_flops = counted_flops(lambda: rank_after_second_pass(bound, cache, [[ranker]], moment))
    return found


def _text(lm: LoadedModel, ids: Tensor) -> ContextText:
    """The prompt as text, without a template."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(lm.tokenizer(text, add_special_tokens=False)["input_ids"])

    return ContextText(tuple(ids.tolist()), 0, encode("\n"), encode)


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
