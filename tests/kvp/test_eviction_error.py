"""Eviction error on recorded traces: the numbers, the rows, and no model anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.contract.attention_sums import attention_rows
from kvbench.errors import BadInput, StoreError, UnknownName
from kvbench.learn.eviction_error import ErrorConfig, measure
from kvbench.learn.trace import TraceSet, utilities
from kvbench.model import open as models
from kvbench.policies.kvp.scorer import ScorerShape, ScorerWeights, scores
from kvbench.stats.aggregate import aggregate
from kvbench.stats.compare import compare_pairs
from kvbench.store.results import read_rows
from tests.kvp import make
from tests.kvp.make import CONTEXT, DIM, KV_HEADS, LAYERS

POLICIES = ("oracle", "knorm", "tova", "snapkv:window=8,kernel=3", "streaming_llm", "random")
BUDGETS = (4, 10, 30, 100)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        pytest.fail("a model was opened")

    for name in ("open_model", "load_model", "check_model"):
        monkeypatch.setattr(models, name, refuse)
    monkeypatch.setattr(models.OpenModel, "load", refuse)


def asked(traces: TraceSet, out: Path, **changes: Any) -> ErrorConfig:
    settings: dict[str, Any] = {"policies": POLICIES, "budgets": BUDGETS, "out": str(out)}
    return ErrorConfig(str(traces.folder), **(settings | changes))


def by_hand(order: Tensor, u: Tensor, budget: int) -> tuple[float, float]:
    """(cost, missed mass) of one head's ranking."""
    cost = sum((rank + 1) * u[slot].item() for rank, slot in enumerate(order.tolist()))
    best = sum((rank + 1) * value for rank, value in enumerate(sorted(u.tolist(), reverse=True)))
    return cost / best, 1 - u[order[:budget]].sum().item() / u.sum().item()


def score_by_hand(policy: str, q: Tensor, k: Tensor) -> Tensor:
    if policy == "knorm":
        return -k.norm(dim=-1)
    # TOVA: the last query's attention, one ranking for the layer
    last = attention_rows(q[None, :, -1:], k[None], DIM**-0.5, k.shape[1] - 1)[0, :, 0]
    return last.mean(0).expand(KV_HEADS, -1)


@pytest.mark.parametrize("policy", ["knorm", "tova"])
@pytest.mark.parametrize("pins", ["none", "3,5"])
def test_costs_equal_a_direct_computation(
    synthetic: TraceSet, tmp_path: Path, policy: str, pins: str
) -> None:
    path, heads = measure(asked(synthetic, tmp_path, policies=(policy,), pins=pins), progress=False)
    rows = read_rows(path)
    first, last = (0, 0) if pins == "none" else (3, 5)
    pinned = [*range(first), *range(CONTEXT - 1, CONTEXT - 1 - last, -1)]
    means = torch.zeros(LAYERS, KV_HEADS)
    for trace in synthetic:
        found = []
        for layer in range(LAYERS):
            q, k, _ = (part.float() for part in trace.layer(layer))
            u = utilities(q, k, DIM**-0.5, [CONTEXT])[0]
            score = score_by_hand(policy, q[:, :CONTEXT], k[:, :CONTEXT])
            for head in range(KV_HEADS):
                rest = [i for i in score[head].argsort(descending=True).tolist() if i not in pinned]
                found.append(by_hand(torch.tensor([*pinned, *rest]), u[head], 10))
                means[layer, head] += found[-1][0] / len(synthetic)
        mine = rows[(rows["sample"] == f"{trace.info.id}@{CONTEXT}") & (rows["budget"] == 10)].iloc[0]
        cost, missed = (sum(numbers) / len(found) for numbers in zip(*found, strict=True))
        assert mine["metric:eviction_cost"] == pytest.approx(cost, rel=1e-4)
        assert mine["metric:missed_mass"] == pytest.approx(missed, abs=1e-5)
    assert torch.allclose(torch.tensor(heads[policy]), means, rtol=1e-4)


@pytest.mark.parametrize("split", ["boundary", "uniform"])
def test_the_oracle_bounds_everybody(synthetic: TraceSet, tmp_path: Path, split: str) -> None:
    path, heads = measure(asked(synthetic, tmp_path, split=split, splits=3), progress=False)
    rows = read_rows(path)
    costs = rows.pivot_table(index="sample", columns="spec", values="metric:eviction_cost")
    assert costs["oracle"].to_numpy() == pytest.approx(1)
    assert (costs.drop(columns="oracle").min() > 1.05).all()
    for budget in (4, 10, 30):
        part = rows[rows["budget"] == budget]
        missed = part.pivot_table(index="sample", columns="spec", values="metric:missed_mass")
        assert (missed.sub(missed["oracle"], axis=0) >= -1e-6).all(axis=None)
        assert missed["oracle"].min() > 0 or budget == 30
    assert (rows[rows["budget"] == 100]["metric:missed_mass"] < 1e-6).all()  # everything stays
    assert set(rows[rows["budget"] == 100]["kept"]) == set(rows["context_tokens"])
    for spec, table in heads.items():
        assert torch.tensor(table).shape == (LAYERS, KV_HEADS)
        every = rows[(rows["spec"] == spec) & (rows["budget"] == 10)]["metric:eviction_cost"].mean()
        assert torch.tensor(table).mean().item() == pytest.approx(every, rel=1e-5)


def test_uniform_splits_come_from_seed_and_trace(synthetic: TraceSet, tmp_path: Path) -> None:
    found = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        config = asked(synthetic, tmp_path / name, policies=("knorm",), split="uniform", splits=3, seed=seed)
        found.append(set(read_rows(measure(config, progress=False)[0])["sample"]))
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == len(synthetic)  # one row per trace: its splits are not independent samples
    points = [int(point) for sample in found[0] for point in sample.split("@")[1].split("+")]
    assert all(32 <= point < make.TOKENS for point in points)
    assert len(set(points)) > 5  # other traces, other points


def test_pins_are_native_on_request(synthetic: TraceSet, tmp_path: Path) -> None:
    path, _ = measure(
        asked(synthetic, tmp_path, policies=("snapkv:window=8,kernel=3",), pins="native"), False
    )
    assert set(read_rows(path)["pins"]) == {"0,8"}


def test_rows_are_those_of_a_run(synthetic: TraceSet, tmp_path: Path) -> None:
    path, _ = measure(asked(synthetic, tmp_path), progress=False)
    rows = read_rows(path)
    assert len(rows) == len(POLICIES) * len(BUDGETS) * len(synthetic)
    assert not rows["key"].duplicated().any()
    table = aggregate(rows, ["eviction_cost", "missed_mass"])
    assert set(table["n"]) == {len(synthetic)}
    assert (table["lo"] <= table["mean"] + 1e-9).all()
    pairs = compare_pairs(rows[rows["budget"] == 4], "knorm", "eviction_cost").set_index("policy")
    assert pairs.loc["oracle", "win"] == len(synthetic)
    assert pairs.loc["oracle", "hi"] < 0


def test_the_same_command_adds_nothing(synthetic: TraceSet, tmp_path: Path) -> None:
    path, heads = measure(asked(synthetic, tmp_path), progress=False)
    before = (path / "rows.jsonl").read_bytes()
    again, same = measure(asked(synthetic, tmp_path), progress=False)
    assert (again / "rows.jsonl").read_bytes() == before
    assert same == heads
    measure(asked(synthetic, tmp_path, budgets=(4, 20)), progress=False)  # a new budget joins
    assert len(read_rows(path)) == len(POLICIES) * (len(BUDGETS) + 1) * len(synthetic)


def test_limit(synthetic: TraceSet, tmp_path: Path) -> None:
    path, _ = measure(asked(synthetic, tmp_path, limit=2), progress=False)
    assert set(read_rows(path)["sample"]) == {f"synthetic|0@{CONTEXT}", f"synthetic|1@{CONTEXT}"}


def test_a_policy_named_twice_counts_once(synthetic: TraceSet, tmp_path: Path) -> None:
    config = asked(synthetic, tmp_path, policies=("snapkv", "snapkv:window=32", "knorm"), budgets=(4,))
    rows = read_rows(measure(config, progress=False)[0])
    assert sorted(rows["spec"].unique()) == ["knorm", "snapkv"]


def test_learned_weights_are_measured_and_checked(synthetic: TraceSet, tmp_path: Path) -> None:
    shape = ScorerShape(LAYERS, KV_HEADS, DIM, hidden=8, position="none")
    spec = f"kvp:weights={make.weights_file(tmp_path / 'w.safetensors', shape, '5e')}"
    _, heads = measure(asked(synthetic, tmp_path / "out", policies=(spec,), limit=1), progress=False)
    weights: ScorerWeights = make.random_weights(shape)
    _, k, v = (torch.cat(parts).float()[:, :CONTEXT] for parts in zip(*_layers(synthetic), strict=True))
    order = scores(weights, torch.cat([k, v], -1)).argsort(-1, descending=True)
    u = torch.cat([utilities(q, k, DIM**-0.5, [CONTEXT])[0] for q, k, _ in _layers(synthetic)])
    wanted = [by_hand(order[agent], u[agent], 4)[0] for agent in range(LAYERS * KV_HEADS)]
    assert torch.tensor(heads[spec]).flatten().tolist() == pytest.approx(wanted, rel=0.02)  # stored as fp16
    other = f"kvp:weights={make.weights_file(tmp_path / 'x.safetensors', shape, 'another')}"
    with pytest.raises(BadInput, match="another fingerprint"):
        measure(asked(synthetic, tmp_path / "other", policies=(other,)), progress=False)


def _layers(traces: TraceSet) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [traces[0].layer(layer) for layer in range(LAYERS)]


def test_bad_input(synthetic: TraceSet, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="kvbench trace"):
        measure(ErrorConfig(str(tmp_path / "nothing"), ("knorm",)), progress=False)
    with pytest.raises(UnknownName, match="knorm"):
        measure(asked(synthetic, tmp_path, policies=("knrom",)), progress=False)
    for change, message in (
        ({"split": "end"}, "uniform or boundary"),
        ({"pins": "4"}, "FIRST,LAST"),
        ({"budgets": (0,)}, "whole numbers"),
        ({"splits": 0}, "whole numbers"),
        ({"limit": 0}, "--limit 0"),
    ):
        with pytest.raises(BadInput, match=message):
            asked(synthetic, tmp_path, **change)
