"""Second passes: texts read after the context, whose attention to it is reduced at once, and forgotten.

In: a cache, who ranks which row, and the text read so far. Out: `Rankings` of the policies that asked; the
cache is as it was. Equal texts are read once for all of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..contract.attention_sums import BLOCK, attention_rows
from ..contract.need import Need
from ..contract.policy import Policy
from ..contract.second_pass import Reading, SecondPass
from ..errors import KvbenchError, PluginError, place_of
from ..model.lm import LoadedModel
from ..model.memory import synchronise
from . import attention
from .attention import Layer
from .bind import BoundPolicies, check_room, reason
from .cache import Cache
from .hidden import recorded_hidden
from .observe import Moment
from .probe import read_probe
from .ranking import PlacedSums, RankingPass, Rankings, RowRanker, Wanted
from .stopwatch import Lap


def rank_after_second_pass(bound: BoundPolicies, cache: Cache, wanted: Wanted, moment: Moment) -> Rankings:
    """Rank for the policies with a second pass.

    The time of all their readings counts in full for each of them: alone, each would need it.
    """
    lm = bound.lm
    readers = [[one for one in row if Need.SECOND_PASS in one.policy.needs] for row in wanted]
    asked, refused = _ask(bound, {one.policy for row in readers for one in row}, moment)
    failures: dict[RowRanker, str] = {
        (row, one): refused[one.policy]
        for row, ones in enumerate(readers)
        for one in ones
        if one.policy in refused
    }
    readers = [[one for one in row if one.policy in asked] for row in readers]
    rows = [row for row, ones in enumerate(readers) if ones]
    if not rows:
        return Rankings(failures=failures)
    part = cache if len(rows) == cache.rows else cache.take_rows(rows)
    pass_of = {policy: asked[policy] for row in rows for policy in (one.policy for one in readers[row])}
    watches = {one: _Watch(lm, one, moment.seen) for one in pass_of.values()}
    texts: defaultdict[tuple[int, ...], list[tuple[_Watch, Reading]]] = defaultdict(list)
    for one, watch in watches.items():
        for reading in one.readings:
            texts[reading.ids].append((watch, reading))
    for ids, users in texts.items():
        _read(lm, part, ids, moment.seen, users)
    done = Rankings(failures=failures)
    for one, watch in watches.items():
        mine = [[who for who in readers[row] if pass_of[who.policy] == one] for row in rows]
        ranking = RankingPass(bound, mine, moment, second=watch.found)
        for bucket in part.buckets:
            for index, scaling in watch.scalings.items():
                ranking(Layer.stored(index, bucket, scaling))
        found = ranking.finish()
        longest = max(len(reading.ids) for reading in one.readings)
        done = done.joined(found.moved(rows, watch.seconds, longest))
    return done


def _ask(
    bound: BoundPolicies, policies: set[Policy], moment: Moment
) -> tuple[Mapping[Policy, SecondPass], Mapping[Policy, str]]:
    """What each policy wants read, and why that of others cannot be."""
    asked: dict[Policy, SecondPass] = {}
    refused: dict[Policy, str] = {}
    for policy in policies:
        try:
            asked[policy] = validated_second_pass(bound.policies[policy], bound.lm, moment)
        except KvbenchError as error:
            refused[policy] = reason(policy, error)
    return asked, refused


def validated_second_pass(policy: Policy, lm: LoadedModel, moment: Moment) -> SecondPass:
    """What a bound policy wants read, checked. Raises PluginError that names the policy."""
    if moment.text is None:
        raise PluginError(f"policy '{policy.name}': the text of the context is not known in this run")
    text = replace(moment.text, ids=moment.text.ids[: moment.seen])
    try:
        asked = policy.second_pass(text)
    except KvbenchError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"policy '{policy.name}', second_pass: {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    known = lm.model.get_input_embeddings().weight.shape[0]
    if not isinstance(asked, SecondPass) or not asked.readings or asked.reduce not in ("max", "sum"):
        raise PluginError(
            f"policy '{policy.name}': second_pass must return a SecondPass with a reading or more"
        )
    for one in asked.readings:
        if not one.ids or not all(0 <= token < known for token in one.ids):
            raise PluginError(
                f"policy '{policy.name}': a second pass reads 1 token or more, from 0 to {known - 1}"
            )
        if not 0 <= one.start < one.stop <= moment.seen or one.sinks < 0:
            raise PluginError(
                f"policy '{policy.name}': a second pass asks for positions {one.start} to {one.stop} and "
                f"{one.sinks} sinks, of {moment.seen} tokens"
            )
        if why := check_room(policy, lm, moment.seen, len(one.ids)):
            raise PluginError(why)
    return asked


def _read(
    lm: LoadedModel, cache: Cache, ids: tuple[int, ...], start: int, users: list[tuple[_Watch, Reading]]
) -> None:
    """Read one text and forget it; every watch of it is charged the reading and its own reductions."""
    hidden: dict[int, Tensor] = {}
    held = {bucket.rows.start: list(bucket.filled) for bucket in cache.buckets}  # slots of the context
    laps: list[tuple[_Watch, Lap]] = []

    def observer(layer: Layer) -> None:
        for watch, reading in users:
            lap = Lap(layer.queries.device)
            slots = held[layer.bucket.rows.start][layer.index]
            watch.look(layer, reading, slots, hidden.get(layer.index))
            lap.end()
            laps.append((watch, lap))

    started = time.perf_counter()
    needs_hidden = any(watch.asked.by_input_norm for watch, _ in users)
    with recorded_hidden(lm, hidden) if needs_hidden else nullcontext():
        tokens = lm.model.get_input_embeddings()(torch.tensor(ids, device=lm.device))
        read_probe(lm, cache, tokens, start, observer, attention.BLOCK)
    synchronise(lm.description.devices)
    seconds = time.perf_counter() - started - sum(lap.seconds for _, lap in laps)
    for watch in {id(watch): watch for watch, _ in users}.values():
        watch.seconds += seconds + sum(lap.seconds for one, lap in laps if one is watch)


class _Watch:
    """Attention of one second pass, reduced while its readings are read.

    found: (layer, first row of the bucket) -> (row, query_head, slot) float32. scalings: layer -> factor on
    its logits. seconds: what the readings took.
    """

    def __init__(self, lm: LoadedModel, asked: SecondPass, seen: int) -> None:
        self.asked = asked
        self.found: PlacedSums = {}
        self.scalings: dict[int, float] = {}
        self.seconds = 0.0
        self._layers = frozenset(lm.geometry.full_layers)
        self._seen = seen

    def look(self, layer: Layer, reading: Reading, slots: int, hidden: Tensor | None) -> None:
        """slots: of the context, which the text follows."""
        if layer.index not in self._layers:
            return
        self.scalings[layer.index] = layer.scaling
        place = (layer.index, layer.bucket.rows.start)
        weights = None
        if self.asked.by_input_norm:
            assert hidden is not None
            mine = hidden[layer.bucket.rows.start : layer.bucket.rows.stop]
            weights = 1 / mine.float().norm(dim=-1).clamp_min(1e-30)
        plain = slots == self._seen
        found = _attention_to(layer, reading, slots, plain, self.asked.reduce, weights)
        known = self.found.get(place)
        if known is not None:
            found = torch.maximum(known, found) if self.asked.reduce == "max" else known + found
        self.found[place] = found


def _attention_to(
    layer: Layer, reading: Reading, slots: int, plain: bool, reduce: str, weights: Tensor | None
) -> Tensor:
    """Attention of the newest tokens to the slots that a reading asks for: (row, query_head, slot) float32.

    Reduced over the tokens in blocks. slots: of the context, before all of the text. plain: nothing of it was
    evicted; slots are positions then, and those not asked for take no part at all. Else they are masked.
    weights: (row, new), factors on the tokens' attention.
    """
    keys, _, positions = layer.bucket.view(layer.index)
    batch, heads, new = layer.queries.shape[:3]
    read = keys.shape[2] - slots - new  # tokens of the text before these
    sinks = min(reading.sinks, reading.start)
    absent = None
    if plain:
        columns = torch.tensor([*range(sinks), *range(reading.start, reading.stop)], device=keys.device)
        shown = torch.cat(
            [keys[:, :, :sinks], keys[:, :, reading.start : reading.stop], keys[:, :, slots:]], 2
        )
    else:
        columns, shown = torch.arange(slots, device=keys.device), keys
        older = positions[:, :, :slots]
        inside = (older < sinks) | ((older >= reading.start) & (older < reading.stop))
        absent = torch.nn.functional.pad(~inside, (0, read + new))
    total: Tensor | None = None
    block = max(16, BLOCK // batch)
    for start in range(0, new, block):
        queries = layer.queries[:, :, start : start + block]
        first = len(columns) + read + start
        rows = attention_rows(queries, shown, layer.scaling, first, absent)[..., : len(columns)]
        if weights is not None:
            rows = rows * weights[:, None, start : start + block, None]
        part = rows.amax(2) if reduce == "max" else rows.sum(2)
        if total is not None:
            part = torch.maximum(total, part) if reduce == "max" else total + part
        total = part
    assert total is not None
    return total.new_zeros(batch, heads, slots).index_copy_(2, columns, total)
