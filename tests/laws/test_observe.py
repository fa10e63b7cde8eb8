"""What policies and metrics see, against nested loops: GQA grouping, causality, the future."""

from __future__ import annotations

import functools
import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kvbench.contract import attention_sums
from kvbench.contract.attention_sums import attention_rows, streamed_sums
from kvbench.contract.eviction import eviction_cost, missed_mass
from tests.laws.lab import SPECS, cells_of, loaded, prompt_of, trial, try_out
from tests.scene import KV_HEADS, QUERY_HEADS, scene
from tests.tiny import ARCHS, tiny_model

GROUP = QUERY_HEADS // KV_HEADS


def by_hand(queries: Tensor, keys: Tensor, scaling: float, offset: int) -> Tensor:
    """attention_rows in Python floats: (batch, query_head, t, slot)."""
    batch, heads, count, _ = queries.shape
    slots = keys.shape[2]
    rows = torch.zeros(batch, heads, count, slots, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            for t in range(count):
                query = queries[b, head, t].double()
                visible = keys[b, head // GROUP, : offset + t + 1].double().tolist()
                logits = [sum(x * y for x, y in zip(query.tolist(), key, strict=True)) for key in visible]
                weights = [math.exp(scaling * logit) for logit in logits]
                for slot, weight in enumerate(weights):
                    rows[b, head, t, slot] = weight / sum(weights)
    return rows


@pytest.mark.parametrize(("slots", "new"), [(12, 12), (12, 5), (9, 1), (1, 1)])
def test_attention_rows(slots: int, new: int) -> None:
    """The last `new` queries, and B36: nothing on keys after the query."""
    seen = scene(slots, new=new, batch=2)
    rows = attention_rows(seen._queries, seen.keys, seen.scaling, slots - new)
    wanted = by_hand(seen._queries, seen.keys, seen.scaling, slots - new)
    torch.testing.assert_close(rows.double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, QUERY_HEADS, new))
    for t in range(new):
        assert (rows[:, :, t, slots - new + t + 1 :] == 0).all()
        assert (rows[:, :, t, : slots - new + t + 1] > 0).all()


@pytest.mark.parametrize("block", [1, 3, 256])
def test_streamed_sums(block: int) -> None:
    """However the queries are cut into blocks."""
    seen = scene(14, new=10, batch=2)
    rows = by_hand(seen._queries, seen.keys, seen.scaling, 4)
    most = torch.zeros(2, KV_HEADS, 14, dtype=torch.float64)
    for b in range(2):
        for head in range(KV_HEADS):
            for slot in range(14):
                for t in range(10):
                    most[b, head, slot] += max(rows[b, head * GROUP + g, t, slot] for g in range(GROUP))
    with patch.object(attention_sums, "BLOCK", block):
        sums = streamed_sums(seen._queries, seen.keys, seen.scaling, 4, "sum")
        maxima = streamed_sums(seen._queries, seen.keys, seen.scaling, 4, "max")
    torch.testing.assert_close(sums.double(), rows.sum(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(maxima.double(), most, atol=1e-5, rtol=0)


def test_by_group() -> None:
    """Query head h belongs to KV head h // group."""
    seen = scene(3)
    x = torch.arange(QUERY_HEADS * 3).view(1, QUERY_HEADS, 3)
    grouped = seen.by_group(x)
    assert grouped.shape == (1, KV_HEADS, GROUP, 3)
    for head in range(QUERY_HEADS):
        assert torch.equal(grouped[0, head // GROUP, head % GROUP], x[0, head])


@functools.cache
def future_use(arch: str, choices: bool = False) -> Tensor:
    """u from a plain eager model's attention maps: (full_layer, kv_head, context).

    The future is all that is read after the eviction: question and reference.
    """
    prompt = trial(arch, "prefill", choices).prompt
    ids = torch.tensor([[*prompt.context, *prompt.question, *prompt.reference.ids]])
    maps = tiny_model(arch, "eager")(ids, output_attentions=True).attentions
    n = len(prompt.context)
    use = []
    for layer in loaded(arch).geometry.full_layers:
        probabilities = maps[layer][0].double()  # (query_head, query, key)
        heads, size = [], probabilities.shape[0] // 2
        for head in range(2):
            group = probabilities[head * size : (head + 1) * size]
            heads.append(sum(group[:, j, :n].max(0).values for j in range(n, ids.shape[1])))
        use.append(torch.stack(heads))  # type: ignore[arg-type]
    return torch.stack(use)


@pytest.mark.parametrize("schedule", ["prefill", "chunked"])
@pytest.mark.parametrize("arch", ARCHS)
def test_missed_mass(arch: str, schedule: str) -> None:
    done = trial(arch, schedule)
    use = future_use(arch)
    for cell in done.cells:
        shares = []
        for index, layer in enumerate(done.lm.geometry.full_layers):
            for head, positions in enumerate(done.kept(cell)[layer].tolist()):
                u = use[index, head]
                shares.append(float(1 - u[positions].sum() / u.sum()))
        assert done[cell].missed_mass == pytest.approx(sum(shares) / len(shares), abs=1e-5)
        assert 0 < done[cell].missed_mass < 1
    assert done.done.full.missed_mass == 0


@pytest.mark.parametrize("spec", SPECS)
def test_missed_mass_falls_with_the_budget(spec: str) -> None:
    done = try_out(loaded("llama"), prompt_of(), cells_of((spec,), (1, 4, 16, 40, 69, 70, 71)))
    missed = [done[cell].missed_mass for cell in done.cells]
    assert missed == sorted(missed, reverse=True)
    assert missed[-2:] == pytest.approx([0, 0], abs=1e-6)
    assert missed[0] > missed[1] > 0


@pytest.mark.parametrize("arch", ["llama", "sliding"])
def test_nobody_beats_the_oracle(arch: str) -> None:
    done = trial(arch, "prefill")
    for budget in {cell.budget for cell in done.cells}:
        missed = {c.spec: done[c].missed_mass for c in done.cells if c.budget == budget}
        assert min(missed, key=missed.__getitem__) == "oracle"
    for cell in done.cells:
        cost = done[cell].eviction_cost
        assert cost is not None
        assert (cost == pytest.approx(1.0, abs=1e-6)) if cell.spec == "oracle" else cost > 1.01


@pytest.mark.parametrize("spec", SPECS)
def test_eviction_cost_is_the_area_of_missed_mass(spec: str) -> None:
    """C is the mass lost at budgets 0, 1, ..., n - 1 together, over the oracle's."""
    n = 20
    prompt = prompt_of(n, seed=2)
    done = try_out(loaded("llama"), prompt, cells_of((spec, "oracle"), range(1, n)))
    ids = torch.tensor([[*prompt.context, *prompt.question, *prompt.reference.ids]])
    maps = tiny_model("llama", "eager")(ids, output_attentions=True).attentions
    ratios = []
    for layer in range(4):
        for head in range(2):
            group = maps[layer][0, head * 4 : head * 4 + 4, n:, :n].double()
            u = group.max(0).values.sum(0)
            cost = dict.fromkeys((spec, "oracle"), float(u.sum()))
            for cell in done.cells:
                kept = done.kept(cell)[layer][head]
                cost[cell.spec] += float(u.sum() - u[kept].sum())
            ratios.append(cost[spec] / cost["oracle"])
    (found,) = {done[cell].eviction_cost for cell in done.cells if cell.spec == spec}
    assert found == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)


@pytest.mark.parametrize(
    ("order", "ratio"), [((0, 2, 1, 3), 1.0), ((0, 1, 2, 3), 2.0 / 1.8), ((3, 1, 2, 0), 3.2 / 1.8)]
)
def test_cost_of_the_paper_example(order: tuple[int, ...], ratio: float) -> None:
    u = torch.tensor([0.5, 0.1, 0.3, 0.1])
    assert eviction_cost(torch.tensor(order), u).item() == pytest.approx(ratio, rel=1e-6)


def test_cost_and_mass_without_any_use() -> None:
    u = torch.zeros(2, 4)
    order = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    assert eviction_cost(order, u).tolist() == [1, 1]
    assert missed_mass(order[:, :2], u).tolist() == [0, 0]
    assert missed_mass(order[:, :0], torch.ones(2, 4)).tolist() == [1, 1]
