"""The scorer: one small network per head, however its heads and layers are batched."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from kvbench.errors import BadInput
from kvbench.policies.kvp.scorer import (
    PositionFeature,
    ScorerShape,
    ScorerWeights,
    fast_scores,
    position_features,
    scores,
)
from tests.kvp.make import random_weights

KINDS: tuple[PositionFeature, ...] = get_args(PositionFeature)
LAYERS, KV_HEADS, DIM, TOKENS = 3, 2, 6, 9


def shape_of(kind: PositionFeature) -> ScorerShape:
    return ScorerShape(LAYERS, KV_HEADS, DIM, hidden=7, position=kind)


def contents(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values (batch, kv_head, token, dim) and positions with gaps, others in every head."""
    draw = torch.Generator().manual_seed(4)
    keys, values = torch.randn(2, batch, KV_HEADS, TOKENS, DIM, generator=draw)
    gaps = torch.randint(1, 300, (batch, KV_HEADS, TOKENS), generator=draw)
    return keys, values, gaps.cumsum(-1)


def one_by_one(weights: ScorerWeights, agent: int, x: Tensor) -> float:
    """Score of one token by one agent, in float64."""
    parts = {name: tensor[agent].double() for name, tensor in weights.tensors().items()}
    standard = (x.double() - parts["mean"]) * parts["scale"]
    total = float(parts["b2"])
    for unit in range(parts["w1"].shape[1]):
        z = float(standard @ parts["w1"][:, unit] + parts["b1"][0, unit])
        total += z * 0.5 * (1 + math.erf(z / math.sqrt(2))) * float(parts["w2"][unit, 0])
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_heads_in_one_call_equal_one_token_at_a_time(kind: PositionFeature) -> None:
    shape = shape_of(kind)
    weights = random_weights(shape)
    keys, values, positions = contents()
    features = position_features(positions, kind)
    inputs = torch.cat([keys, values, features], -1)
    assert inputs.shape[-1] == shape.inputs
    for layer in range(LAYERS):
        of_layer = weights.agents_of(layer, KV_HEADS)
        slow = scores(of_layer, inputs)
        folded = weights.folded().agents_of(layer, KV_HEADS)
        fast = fast_scores(folded, keys, values, features)
        assert slow.shape == fast.shape == (2, KV_HEADS, TOKENS)
        close = 1e-3 if kind == "raw" else 1e-4  # positions in the thousands, not standardised here
        assert torch.allclose(slow, fast, rtol=close, atol=close)
        for head in range(KV_HEADS):
            wanted = one_by_one(weights, layer * KV_HEADS + head, inputs[1, head, 5])
            assert slow[1, head, 5].item() == pytest.approx(wanted, rel=1e-4, abs=1e-4)
            alone = slice(head, head + 1)
            single = ScorerWeights(**{name: t[alone] for name, t in folded.tensors().items()})
            parts = (keys[:, alone], values[:, alone], features[:, alone])
            assert torch.allclose(fast_scores(single, *parts), fast[:, alone], rtol=1e-5, atol=1e-5)


def test_fast_scores_read_half_precision_caches() -> None:
    weights = random_weights(shape_of("log")).folded().agents_of(0, KV_HEADS)
    keys, values, positions = contents()
    features = position_features(positions, "log")
    rounded = fast_scores(weights, keys.bfloat16().float(), values.bfloat16().float(), features)
    assert torch.equal(fast_scores(weights, keys.bfloat16(), values.bfloat16(), features), rounded)
    assert rounded.dtype == torch.float32


def test_standardisation_is_part_of_the_score() -> None:
    """Shifted and stretched inputs under the matching statistics give the same scores."""
    weights = random_weights(shape_of("none"))
    weights.mean, weights.scale = torch.zeros_like(weights.mean), torch.ones_like(weights.scale)
    x = torch.randn(LAYERS * KV_HEADS, TOKENS, 2 * DIM, generator=torch.Generator().manual_seed(1))
    before = scores(weights, x)
    weights.mean, weights.scale = weights.mean + 5, weights.scale / 3
    assert torch.allclose(scores(weights, x * 3 + 5), before, atol=1e-4)
    assert torch.allclose(scores(weights.folded(), x * 3 + 5), before, atol=1e-4)


def test_position_features() -> None:
    positions = torch.tensor([[0, 1, 4096, 100_000]])
    assert position_features(positions, "none").shape == (1, 4, 0)
    assert position_features(positions, "raw")[0, :, 0].tolist() == [0, 1, 4096, 100_000]
    assert position_features(positions, "normalised")[0, :3, 0].tolist() == [0, 1 / 4096, 1]
    assert position_features(positions, "log")[0, 2, 0].item() == pytest.approx(math.log(4097))
    waves = position_features(positions, "sinusoidal")
    assert waves.shape == (1, 4, 16)
    assert waves[0, 0].tolist() == [0.0] * 8 + [1.0] * 8
    lengths = [2 * math.pi * 10_000 ** (i / 7) for i in range(8)]  # 2 pi ... 2 pi 10^4
    assert waves[0, 1, :8].tolist() == pytest.approx([math.sin(2 * math.pi / w) for w in lengths], abs=1e-5)
    assert waves[0, 2, 8:].tolist() == pytest.approx(
        [math.cos(2 * math.pi * 4096 / w) for w in lengths], abs=3e-3
    )
    for kind in KINDS:
        assert position_features(positions, kind).dtype == torch.float32


def test_position_features_depend_on_the_original_position_only() -> None:
    positions = torch.arange(50)
    kept = positions[[3, 20, 49]]
    for kind in KINDS:
        whole = position_features(positions, kind)
        assert torch.equal(position_features(kept, kind), whole[[3, 20, 49]])


def test_a_new_scorer_ranks_nothing() -> None:
    weights = ScorerWeights.initial(shape_of("log"), torch.Generator().manual_seed(0))
    x = torch.randn(LAYERS * KV_HEADS, TOKENS, shape_of("log").inputs)
    assert scores(weights, x).eq(0).all()
    again = ScorerWeights.initial(shape_of("log"), torch.Generator().manual_seed(0))
    assert torch.equal(weights.w1, again.w1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"position": "rotary"}, "sinusoidal"), ({"hidden": 0}, "1 or more"), ({"layers": -1}, "1 or more")],
)
def test_impossible_shapes_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ScorerShape(**{"layers": 1, "kv_heads": 1, "dim": 4, **sizes})
