"""DefensiveKV, R-KV, VaSE, NACL, CAOTE, OBCache and non-causal attention against naive loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.contract.observation import Observation
from kvbench.contract.registry import POLICIES
from kvbench.errors import BadInput
from tests.scene import KV_HEADS, QUERY_HEADS, scene

GROUP = QUERY_HEADS // KV_HEADS
SLOTS = 40


@pytest.fixture(params=[None, 18], ids=["one chunk", "gaps"])
def seen(request: pytest.FixtureRequest) -> Observation:
    return scene(SLOTS, new=request.param)


def score(spec: str, seen: Observation) -> Tensor:
    """(kv_head, slot) float64."""
    policy = POLICIES.parse(spec)
    return policy.score(seen.limited_to(policy.needs))[0].double()


def logits(seen: Observation, head: int, member: int, row: int, stop: int) -> Tensor:
    """Of the query `row` places before the last with the first slots: (stop,) float64."""
    query = seen._queries[0, head * GROUP + member, seen.new - 1 - row].double()
    return seen.keys[0, head, :stop].double() @ query * seen.scaling


def causal(seen: Observation, head: int, member: int, row: int) -> Tensor:
    """Attention of that query to all slots, 0 behind itself: (slot,)."""
    visible = SLOTS - row
    found = torch.zeros(SLOTS, dtype=torch.float64)
    found[:visible] = logits(seen, head, member, row, visible).softmax(0)
    return found


def averaged(x: Tensor, kernel: int) -> Tensor:
    """Sums of neighbours over the kernel's width, whatever is beyond the ends counting 0."""
    half = kernel // 2
    return torch.stack([x[max(i - half, 0) : i + half + 1].sum() / kernel for i in range(len(x))])


def places(x: Tensor) -> list[int]:
    order = sorted(range(len(x)), key=lambda i: (x[i].item(), i))
    return [order.index(i) for i in range(len(x))]


def same_order(found: Tensor, expected: list[int]) -> None:
    """expected: slots, the best first."""
    assert sorted(range(len(found)), key=lambda i: -found[i].item()) == expected


def test_caote_is_what_the_output_loses(seen: Observation) -> None:
    """For one query: the change of its output when a token goes and the others share its attention."""
    found = score("caote:window=1", seen)
    for head in range(KV_HEADS):
        values = seen.values[0, head].double()
        for slot in range(SLOTS):
            total = 0.0
            for member in range(GROUP):
                weights = causal(seen, head, member, 0)
                without = weights.clone()
                without[slot] = 0
                change = weights @ values - (without / without.sum()) @ values
                total += change.norm().item() / GROUP
            assert found[head, slot].item() == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("of", ["value", "key", "both"])
def test_obcache(seen: Observation, of: str) -> None:
    found = score(f"obcache:window=4,of={of}", seen)
    for head in range(KV_HEADS):
        values, total = seen.values[0, head].double(), torch.zeros(SLOTS, dtype=torch.float64)
        for member in range(GROUP):
            for row in range(4):
                weights = causal(seen, head, member, row)
                raw = logits(seen, head, member, row, SLOTS)
                output = weights @ values
                for slot in range(SLOTS):
                    of_value = weights[slot] * values[slot]
                    of_key = weights[slot] * raw[slot] * (values[slot] - output)
                    error = {"value": of_value, "key": of_key, "both": of_value + of_key}[of]
                    total[slot] += error.square().sum()
        torch.testing.assert_close(found[head], total, rtol=1e-4, atol=1e-6)


def test_r_kv(seen: Observation) -> None:
    """Importance of the older slots from the largest logits of a group, less redundancy among all keys."""
    window, weight, older = 5, 0.3, SLOTS - 5
    found = score(f"r_kv:window={window},weight={weight},similar=0.2,kernel=3", seen)
    for head in range(KV_HEADS):
        attention = torch.zeros(older, dtype=torch.float64)
        for row in range(window):
            best = torch.stack([logits(seen, head, m, row, older) for m in range(GROUP)]).amax(0)
            attention += best.softmax(0) / window
        importance = [attention[max(i - 1, 0) : i + 2].max().item() for i in range(older)]
        unit = torch.nn.functional.normalize(seen.keys[0, head].double(), dim=-1)
        alike = (unit @ unit.T).fill_diagonal_(0.0)
        for row in range(SLOTS):  # the newest of those that a token resembles is forgiven
            similar = [i for i in range(SLOTS) if alike[row, i] > 0.2]
            alike[row, similar[-1] if similar else 0] = 0.0
        redundancy = (alike.sum(0) / SLOTS).softmax(0)
        for slot in range(older):
            expected = weight * importance[slot] - (1 - weight) * redundancy[slot].item()
            assert found[head, slot].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert found[head, older:].diff().min() > 0
        assert found[head, older] > found[head, :older].max()


def test_vase(seen: Observation) -> None:
    """The sinks, the window, the 3 widest values, then log attention plus the tokens' own noise."""
    window, older = 6, SLOTS - 6
    found = score(f"vase:window={window},large=5,sinks=2,kernel=3", seen)
    for head in range(KV_HEADS):
        attention = torch.zeros(older, dtype=torch.float64)
        for row in range(window):
            for member in range(GROUP):
                attention += logits(seen, head, member, row, older).softmax(0) / window / GROUP
        drawn = seen.limited_to(POLICIES.parse("random").needs).uniform()[0, head, :older].double()
        noise = averaged(attention, 3).log() - (-drawn.clamp(1e-12, 1 - 1e-7).log()).log()
        values = seen.values[0, head, :older].double()
        span = (values.amax(-1) - values.amin(-1)).masked_fill(seen.positions[0, head, :older] < 2, math.inf)
        wide = sorted(range(older), key=lambda i: (-span[i].item(), -i))[:5]
        rest = sorted(set(range(older)) - set(wide), key=lambda i: -noise[i].item())
        same_order(found[head], [*range(SLOTS - 1, older - 1, -1), *wide, *rest])


def test_nacl_takes_turns(seen: Observation) -> None:
    """Whoever is among the first 3 n by attention or the first 2 n of the sample is kept in turn n."""
    found = score("nacl:proxies=0.1,top=3,drawn=2,sinks=2,recent=4", seen)
    proxies = max(1, int(0.1 * seen.seen))
    for head in range(KV_HEADS):
        received = torch.zeros(SLOTS, dtype=torch.float64)
        for row in range(proxies):
            for member in range(GROUP):
                received += logits(seen, head, member, row, SLOTS).softmax(0) / GROUP
        position = seen.positions[0, head]
        free = [i for i in range(SLOTS) if 2 <= position[i] < seen.seen - 4]
        drawn = seen.limited_to(POLICIES.parse("random").needs).uniform()[0, head].double()
        sample = received - (-drawn.clamp(1e-12, 1 - 1e-7).log()).log()
        best = {slot: n for n, slot in enumerate(sorted(free, key=lambda i: -received[i].item()), 1)}
        picked = {slot: n for n, slot in enumerate(sorted(free, key=lambda i: -sample[i].item()), 1)}
        for slot in range(SLOTS):
            turn = min(best[slot] / 3, picked[slot] / 2) if slot in best else -1.0
            assert found[head, slot].item() == pytest.approx(-turn)


def test_defensive_kv(seen: Observation) -> None:
    """The largest means up to the mass come first, then the worst case times the size of values."""
    window, older, mass = 5, SLOTS - 5, 0.9
    found = score(f"defensive_kv:window={window},kernel=3,mass={mass}", seen)
    means, worst = [], []
    for head in range(KV_HEADS):
        rows = [causal(seen, head, m, row)[:older] for m in range(GROUP) for row in range(window)]
        smooth = [(x := averaged(one, 3)) / x.sum() * one.sum() for one in rows]
        top = torch.stack(smooth).amax(0)
        worst.append(top.maximum(top.mean()))
        means.append(torch.stack(rows).mean(0))
    near = torch.stack([mean[-window:].sum() for mean in means]).mean()
    size = seen.values[0, :, :older].double().abs().sum(-1)
    for head in range(KV_HEADS):
        share, total, first = means[head] / means[head].sum(), 0.0, []
        for slot in sorted(range(older), key=lambda i: -share[i].item()):
            total += share[slot].item()
            if total >= mass - near:
                break
            first.append(slot)
        risk = worst[head] * size[head] / size.sum(0)
        rest = sorted(set(range(older)) - set(first), key=lambda i: -risk[i].item())
        same_order(found[head], [*range(SLOTS - 1, older - 1, -1), *first, *rest])
        assert first
        assert rest


def test_non_causal_attention_in_one_chunk() -> None:
    """Tiles of 16, 16 and 8: queries of a tile look at all of the tile."""
    whole = scene(SLOTS)
    found = score("non_causal_attention:tile=16,kernel=3", whole)
    for head in range(KV_HEADS):
        total = torch.zeros(SLOTS, dtype=torch.float64)
        for start in range(0, SLOTS, 16):
            stop = min(start + 16, SLOTS)
            keys = whole.keys[0, head, start:stop].double()
            for member in range(GROUP):
                queries = whole._queries[0, head * GROUP + member, start:stop].double()
                total[start:stop] += (queries @ keys.T).softmax(-1).sum(0) / GROUP
        expected = averaged(total * whole.values[0, head].double().norm(dim=-1), 3)
        torch.testing.assert_close(found[head], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        "caote:window=0", "obcache:of=all", "obcache:window=0", "r_kv:weight=2", "r_kv:kernel=4",
        "vase:large=-1", "vase:window=0", "nacl:proxies=0", "nacl:drawn=0", "defensive_kv:mass=2",
        "defensive_kv:kernel=2", "non_causal_attention:tile=0", "non_causal_attention:kernel=2",
    ],
)  # fmt: skip
def test_bad_parameters_name_the_policy(spec: str) -> None:
    with pytest.raises(BadInput, match=spec.partition(":")[0]):
        POLICIES.parse(spec)
