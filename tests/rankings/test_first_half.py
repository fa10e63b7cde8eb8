"""Observed attention, VATP, CUR and the two ChunkKVs: numbers worked out by hand, and naive loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES
from kvbench.errors import BadInput
from kvbench.policies.chunk_kv import ChunkKV
from kvbench.policies.cur import CUR
from kvbench.policies.entropy_chunk_kv import EntropyChunkKV
from tests.scene import KV_HEADS, QUERY_HEADS, scene


@dataclass(frozen=True)
class Given(Policy):
    """Gives the scores that the test wrote into the values' first channel."""

    def score(self, seen: Observation) -> torch.Tensor:
        return seen._whole.values[..., 0].float() if seen._whole else seen.values[..., 0].float()


def holding(scores: list[float], like: Observation | None = None) -> Observation:
    """An observation whose values' first channel are these scores, in all heads."""
    seen = like or scene(len(scores))
    values = seen.values.clone()
    values[..., 0] = torch.tensor(scores)
    return replace(seen, values=values)


def order(score: torch.Tensor) -> list[int]:
    """Slots of the first head, the best first; of equals the newer."""
    values = score[0, 0].tolist()
    return sorted(range(len(values)), key=lambda slot: (-values[slot], -slot))


@pytest.mark.parametrize("new", [None, 7])
@pytest.mark.parametrize("mean", [True, False])
def test_observed_attention_is_a_mean_over_those_who_see(new: int | None, mean: bool) -> None:
    seen = scene(20, new=new)
    found = POLICIES.parse(f"observed_attention:mean={str(mean).lower()}").score(seen)
    group, count = QUERY_HEADS // KV_HEADS, seen.new
    for head in range(KV_HEADS):
        for slot in range(20):
            total, readers = 0.0, 0
            for query in range(count):
                visible = 20 - count + query + 1
                if slot >= visible:
                    continue
                readers += 1
                for member in range(group):
                    one = seen._queries[0, head * group + member, query].double()
                    logits = seen.keys[0, head, :visible].double() @ one * seen.scaling
                    total += float(logits.softmax(0)[slot]) / group
            assert float(found[0, head, slot]) == pytest.approx(total / (readers if mean else 1), rel=1e-4)


def test_vatp_weighs_attention_by_value_norms() -> None:
    seen = scene(12)
    base = POLICIES.parse("observed_attention:mean=false").score(seen)
    for p in (1, 2):
        found = POLICIES.parse(f"vatp:p={p}").score(seen)
        torch.testing.assert_close(found, base * seen.values.norm(p=p, dim=-1))


def test_vatp_refuses_scores_that_are_no_attention() -> None:
    with pytest.raises(BadInput, match="no attention"):
        POLICIES.parse("vatp:base=knorm")


def test_cur_by_hand() -> None:
    """Blocks of 2."""
    keys = torch.tensor([[1.0, 0], [0, 2], [1, 1], [3, 0]]).expand(1, 1, 4, 2)
    values = torch.tensor([[1.0, 1], [1, 0], [0, 2], [1, 0]]).expand(1, 1, 4, 2)
    seen = replace(scene(4), keys=keys, values=values)
    shares = CUR(block=2)._shares(keys.square().sum(-1))
    torch.testing.assert_close(shares[0, 0], torch.tensor([0.2, 0.8, 0.1818, 0.8182]), atol=1e-4, rtol=0)
    wanted = torch.tensor([0.18803, 0.37607, 0.20513, 0.23077])
    torch.testing.assert_close(CUR(block=2).score(seen)[0, 0], wanted, atol=1e-5, rtol=0)


def test_a_block_of_zeros_has_no_shares() -> None:
    seen = replace(scene(8), keys=torch.zeros(1, 2, 8, 8))
    assert CUR(block=4).score(seen).isfinite().all()


@pytest.mark.parametrize("length", [3, 4, 7])
def test_chunk_kv_orders_whole_chunks(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkKV, "inner", Given())
    seen = scene(17, seed=3)
    scores = seen.values[0, :, :, 0].sum(0).tolist()  # over KV heads
    chunks = [range(start, min(start + length, 17)) for start in range(0, 17, length)]
    means = [sum(scores[slot] for slot in chunk) / len(chunk) for chunk in chunks]
    best = sorted(range(len(chunks)), key=lambda c: (-means[c], -c))
    found = POLICIES.parse(f"chunk_kv:length={length}").score(seen)
    assert order(found) == [slot for c in best for slot in chunks[c]]
    assert torch.equal(found[:, 0], found[:, 1])


def test_entropy_chunk_kv_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """N = 14, length 4, 1 token of a gated chunk."""
    monkeypatch.setattr(EntropyChunkKV, "inner", Given())
    scores = [0.1] * 4 + [0.9, 0, 0, 0] + [0.2] * 4 + [0.05, 0.05]
    found = POLICIES.parse("entropy_chunk_kv:length=4,low=1").score(holding(scores))
    assert sorted(order(found)[:7]) == [2, 3, 4, 8, 9, 10, 11]


def test_entropy_chunk_kv_as_a_rule_per_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefix of the order is what the published loop keeps at that budget."""
    monkeypatch.setattr(EntropyChunkKV, "inner", Given())
    draw = torch.Generator().manual_seed(5)
    for _ in range(5):
        scores = (torch.randn(23, generator=draw) ** 3).tolist()
        seen = holding(scores)
        summed = (seen.values[0, :, :, 0].sum(0)).tolist()
        kept = order(POLICIES.parse("entropy_chunk_kv:length=5,low=2").score(seen))
        for budget in range(1, 24):
            assert set(kept[:budget]) == published(summed, budget, 5, 2)


def published(scores: list[float], budget: int, length: int, low: int) -> set[int]:
    chunks = [list(range(start, min(start + length, len(scores)))) for start in range(0, len(scores), length)]
    means = [sum(scores[slot] for slot in chunk) / len(chunk) for chunk in chunks]
    entropies = []
    for chunk in chunks:
        least = min(0.0, *(scores[slot] for slot in chunk))
        parts = [scores[slot] - least for slot in chunk]
        shares = [part / (sum(parts) + 1e-8) for part in parts]
        entropy = -sum(share * math.log(share + 1e-8) for share in shares) / math.log(max(2, len(chunk)))
        entropies.append(min(max(entropy, 0.0), 1.0) if len(chunk) > 1 else 0.0)
    lower = lambda values: sorted(values)[(len(values) - 1) // 2]  # noqa: E731
    kept: list[int] = []
    for c in sorted(range(len(chunks)), key=lambda c: (-means[c], -c)):
        gated = means[c] >= lower(means) and entropies[c] < lower(entropies)
        count = min(len(chunks[c]), budget - len(kept), low if gated else length)
        kept += sorted(chunks[c], key=lambda slot: (-scores[slot], -slot))[:count]
    rest = [slot for slot in range(len(scores)) if slot not in kept]
    return set(kept) | set(sorted(rest, key=lambda slot: (-scores[slot], -slot))[: budget - len(kept)])


@pytest.mark.parametrize(
    "spec",
    [
        "chunk_kv:length=0",
        "entropy_chunk_kv:low=0",
        "cur:block=0",
        "cur:sinks=-1",
        "entropy_chunk_kv:length=0",
    ],
)
def test_parameters_that_make_no_sense_are_refused(spec: str) -> None:
    with pytest.raises(BadInput):
        POLICIES.parse(spec)
