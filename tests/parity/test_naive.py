"""Each policy against its paper, read as nested loops over heads and tokens in double precision.

Every `keeps_*` below answers one question: which slots of one KV head does the published method
keep at this budget? None of them shares code with the policy it checks, nor with the ranking.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from kvbench.contract.attention_sums import streamed_sums
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.knorm import KNorm
from kvbench.policies.lagkv import LagKV
from kvbench.policies.oracle import Oracle
from kvbench.policies.random import Random
from kvbench.policies.snapkv import SnapKV
from kvbench.policies.streaming_llm import StreamingLLM
from kvbench.policies.tova import TOVA
from tests.scene import KV_HEADS, QUERY_HEADS, ranked, scene

GROUP = QUERY_HEADS // KV_HEADS
BUDGETS = (1, 2, 5, 9, 13, 20, 33, 47, 60)
Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def softmax(logits: Vector) -> Vector:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [weight / math.fsum(weights) for weight in weights]


def largest(values: Vector, count: int) -> set[int]:
    return set(sorted(range(len(values)), key=lambda i: values[i], reverse=True)[: max(count, 0)])


def keys_of(seen: Observation, head: int) -> list[Vector]:
    return seen.keys[0, head].double().tolist()


def attention(seen: Observation, query_head: int, from_end: int) -> Vector:
    """Probabilities of the query of the `from_end`-th last token over the slots; later slots get 0."""
    query = seen._queries[0, query_head, -from_end].double().tolist()
    keys = keys_of(seen, query_head // GROUP)
    visible = len(keys) - from_end + 1
    return softmax([dot(query, key) * seen.scaling for key in keys[:visible]]) + [0.0] * (from_end - 1)


def keeps_streaming_llm(seen: Observation, head: int, budget: int, policy: StreamingLLM) -> set[int]:
    positions = seen.positions[0, head].tolist()
    sinks = [slot for slot, position in enumerate(positions) if position < policy.sinks]
    if budget <= len(sinks):
        return set(sinks[:budget])
    return set(sinks) | set(range(len(positions) - (budget - len(sinks)), len(positions)))


def keeps_knorm(seen: Observation, head: int, budget: int, policy: KNorm) -> set[int]:
    return largest([-math.sqrt(dot(key, key)) for key in keys_of(seen, head)], budget)


def keeps_keydiff(seen: Observation, head: int, budget: int, policy: KeyDiff) -> set[int]:
    """The pairwise form: the policy uses the anchor, which must give the same order."""
    keys = keys_of(seen, head)
    norms = [math.sqrt(dot(key, key)) for key in keys]
    alike = []
    for i, a in enumerate(keys):
        alike.append(math.fsum(dot(a, b) / norms[i] / norms[j] for j, b in enumerate(keys)))
    return largest([-total for total in alike], budget)


def lag_spread(part: list[Vector], reference: list[Vector]) -> Vector:
    """Softmax over a partition of each token's deviation over channels, scaled by the next partition."""
    channels = range(len(part[0]))
    low = [min(row[d] for row in reference) for d in channels]
    high = [max(row[d] for row in reference) for d in channels]
    deviations = []
    for row in part:
        scaled = [(row[d] - low[d]) / (high[d] - low[d]) for d in channels]
        mean = math.fsum(scaled) / len(scaled)
        deviations.append(math.sqrt(math.fsum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1)))
    return softmax(deviations)


def keeps_lagkv(seen: Observation, head: int, budget: int, policy: LagKV) -> set[int]:
    """Any budget: as many whole rounds (one token of every scored partition) as fit, then the newest
    partitions' next token; below the protected tail, the sinks and the newest."""
    sinks, lag = policy.sinks, policy.lag
    keys, values = keys_of(seen, head), seen.values[0, head].double().tolist()
    parts = (len(keys) - sinks) // lag
    fixed = [slot for slot, position in enumerate(seen.positions[0, head].tolist()) if position < sinks]
    kept = fixed[:budget]
    scored = range(parts - 1) if parts >= 2 else range(0)
    tail = [slot for slot in range(sinks + len(scored) * lag, len(keys)) if slot not in fixed]
    kept += tail[::-1][: budget - len(kept)]
    rounds = []
    for p in scored:
        here = slice(sinks + p * lag, sinks + (p + 1) * lag)
        after = slice(here.stop, here.stop + lag)
        k, v = lag_spread(keys[here], keys[after]), lag_spread(values[here], values[after])
        both = [a + b for a, b in zip(k, v, strict=True)]
        best = sorted(range(lag), key=lambda i: both[i], reverse=True)
        rounds.append([here.start + i for i in best])
    for nth in range(lag):
        for order in reversed(rounds):
            if len(kept) < budget and order[nth] not in kept:
                kept.append(order[nth])
    return set(kept)


def keeps_tova(seen: Observation, head: int, budget: int, policy: TOVA) -> set[int]:
    rows = [attention(seen, query_head, 1) for query_head in range(QUERY_HEADS)]
    return largest([math.fsum(column) / QUERY_HEADS for column in zip(*rows, strict=True)], budget)


def pool(values: Vector, kernel: int, how: str) -> Vector:
    half, pooled = kernel // 2, []
    for i in range(len(values)):
        near = [values[j] for j in range(i - half, i + half + 1) if 0 <= j < len(values)]
        pooled.append(max(near) if how == "max" else math.fsum(near) / kernel)
    return pooled


def keeps_snapkv(seen: Observation, head: int, budget: int, policy: SnapKV) -> set[int]:
    slots = seen.slots
    older = max(slots - policy.window, 0)
    window = list(range(older, slots))[::-1][:budget]
    per_head = []
    for query_head in range(head * GROUP, (head + 1) * GROUP):
        received = [0.0] * slots
        for from_end in range(1, min(policy.window, seen.new) + 1):
            for slot, weight in enumerate(attention(seen, query_head, from_end)):
                received[slot] += weight
        per_head.append(pool(received[:older], policy.kernel, policy.pooling))
    reduce = max if policy.group == "max" else (lambda column: math.fsum(column) / len(column))
    score = [reduce(column) for column in zip(*per_head, strict=True)]
    chosen = sorted(range(older), key=lambda i: (-score[i], -i))[: budget - len(window)]
    return set(window) | set(chosen)


CASES: list[tuple[Policy, Callable[..., set[int]]]] = [
    (StreamingLLM(), keeps_streaming_llm),
    (StreamingLLM(sinks=0), keeps_streaming_llm),
    (KNorm(), keeps_knorm),
    (KeyDiff(), keeps_keydiff),
    (LagKV(sinks=2, lag=8), keeps_lagkv),
    (LagKV(sinks=0, lag=15), keeps_lagkv),
    (LagKV(sinks=4, lag=128), keeps_lagkv),
    (TOVA(), keeps_tova),
    (SnapKV(window=8, kernel=3, pooling="avg"), keeps_snapkv),
    (SnapKV(window=8, kernel=7, pooling="max"), keeps_snapkv),
    (SnapKV(window=5, kernel=5, pooling="max", group="max"), keeps_snapkv),
    (SnapKV(window=64), keeps_snapkv),
]


@pytest.mark.parametrize("new", [60, 20, 3], ids=["one go", "after evictions", "short last chunk"])
@pytest.mark.parametrize(("policy", "naive"), CASES, ids=[f"{policy}" for policy, _ in CASES])
def test_kept_sets_of_the_paper(policy: Policy, naive: Callable[..., set[int]], new: int) -> None:
    seen = scene(60, new=new, pins=policy.pins, seed=new)
    score = policy.score(seen.limited_to(policy.needs))
    orders = ranked(score, seen, policy.pins)
    for head in range(KV_HEADS):
        for budget in BUDGETS:
            assert set(orders[head][:budget]) == naive(seen, head, budget, policy), (head, budget)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_lagkv_keeps_what_the_official_ratio_keeps(share: float) -> None:
    """At S + int(rL)(P-1) + L + R the set is: int(rL) best of each scored partition, and the rest."""
    policy = LagKV(sinks=3, lag=8)
    seen = scene(64)
    parts, remainder = divmod(64 - policy.sinks, policy.lag)
    each = int(share * policy.lag)
    budget = policy.sinks + each * (parts - 1) + policy.lag + remainder
    orders = ranked(policy.score(seen), seen, policy.pins)
    for head in range(KV_HEADS):
        keys, values = keys_of(seen, head), seen.values[0, head].double().tolist()
        kept = set(range(policy.sinks)) | set(range(64 - policy.lag - remainder, 64))
        for p in range(parts - 1):
            start, stop = policy.sinks + p * policy.lag, policy.sinks + (p + 1) * policy.lag
            k = lag_spread(keys[start:stop], keys[stop : stop + policy.lag])
            v = lag_spread(values[start:stop], values[stop : stop + policy.lag])
            kept |= {start + i for i in largest([a + b for a, b in zip(k, v, strict=True)], each)}
        assert set(orders[head][:budget]) == kept


def test_lagkv_ignores_a_channel_without_spread() -> None:
    """One constant channel divides by zero in the formula; it must not poison its partition."""
    seen = scene(60)
    keys = seen.keys.clone()
    keys[..., 2] = 0.5
    score = LagKV(sinks=2, lag=8).score(dataclasses.replace(seen, keys=keys))
    assert score.isfinite().all()
    assert sorted(score[0, 0, 2:10].tolist()) == [i / 8 for i in range(8)]


def test_tova_has_one_ranking_per_layer() -> None:
    score = TOVA().score(scene(60))
    assert score[:, 0].tolist() == score[:, 1].tolist()


def test_snapkv_max_and_mean_of_the_group_differ() -> None:
    """The reduction is part of the policy: it may not silently do nothing."""
    seen = scene(60)
    mean, top = (SnapKV(window=8, group=group).score(seen) for group in ("mean", "max"))
    assert (top >= mean).all()
    assert not mean.equal(top)


@pytest.mark.parametrize("context", [7, 40])
def test_oracle_sums_the_groups_best_head_over_the_future(context: int) -> None:
    """u_i = sum over future j of the max over the group of A(j, i), softmax over everything up to j."""
    whole = scene(context + 12, seed=4)
    future = whole._queries[:, :, context:]
    sums = streamed_sums(future, whole.keys, whole.scaling, context, "max")[..., :context]
    seen = dataclasses.replace(scene(context, seed=5), _future=lambda: sums)
    orders = ranked(Oracle().score(seen), seen, Oracle().pins)
    for head in range(KV_HEADS):
        utility = [0.0] * context
        for from_end in range(1, 13):
            rows = [attention(whole, head * GROUP + member, from_end) for member in range(GROUP)]
            for slot in range(context):
                utility[slot] += max(row[slot] for row in rows)
        for budget in (1, 3, 6, 20):
            assert set(orders[head][:budget]) == largest(utility, budget)


def test_oracle_follows_positions_after_evictions() -> None:
    seen = scene(30, new=10)
    future = seen._future() if seen._future else None
    assert future is not None
    for head, positions in enumerate(seen.positions[0].tolist()):
        assert Oracle().score(seen)[0, head].tolist() == [future[0, head, p].item() for p in positions]


def test_random_draws_stay_with_their_token() -> None:
    """A token keeps its draw when others go; heads, layers and samples draw on their own."""
    whole = scene(400)
    draws = Random().score(whole)
    survivors = whole.positions[..., ::3]
    left = dataclasses.replace(whole, positions=survivors, keys=whole.keys[:, :, ::3])
    assert Random().score(left).equal(draws[..., ::3])
    others = [draws[0, 1]] + [
        Random().score(dataclasses.replace(whole, **change))[0, 0] for change in ({"layer": 4}, {"_draw": 1})
    ]
    for other in others:
        assert (other != draws[0, 0]).float().mean() > 0.99


def test_random_is_uniform_over_positions() -> None:
    """Each quarter of the context gets its share of the kept: 500 of 2000, with a standard deviation
    of 19; 100 would be more than five of them."""
    seen = scene(8000)
    kept = ranked(Random().score(seen), seen, Random().pins)[0][:2000]
    for quarter in range(4):
        assert abs(sum(slot // 2000 == quarter for slot in kept) - 500) < 100
