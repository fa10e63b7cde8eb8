"""Kept sets of our rankings and of kvpress 0.5.5 on real text, in a Llama and in a Qwen3 with QK-norm.

Random weights, so that no model need be there; every layer. Conventions that differ are named where they are
removed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvbench.contract.calibration import Calibration, write_calibration
from kvbench.contract.layer_parts import LayerParts
from kvbench.contract.model_description import ModelDescription
from kvbench.contract.observation import Observation
from kvbench.contract.policy import TrainedFor
from kvbench.contract.registry import POLICIES
from kvbench.engine.order import keep, rank
from kvbench.policies.expected_attention.policy import MOMENTS
from kvbench.policies.kvzap.policy import PARTS
from kvbench.policies.leverage import gaussian
from tests.parity.test_kvpress import Recorded, presses  # noqa: F401
from tests.tiny import HEAD_DIM, KV_HEADS, LAYERS, tiny_loaded, tiny_model, tiny_tokenizer

TOKENS = 12 + 2 * 256  # tiles of Compactor without padding, in which kvpress lets padding take part
BUDGETS = (32, 64, 128, 256, 400)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def layers(request: pytest.FixtureRequest) -> list[Recorded]:
    """Every layer of a plain model, read without our engine; rotation and W_O as our engine finds them."""
    model, parts = tiny_model(request.param, "sdpa"), tiny_loaded(request.param).parts
    ids = tiny_tokenizer()(topics["exceptions"] + topics["naming"], return_tensors="pt").input_ids[:, :TOKENS]
    inputs: dict[int, Any] = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress does
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: inputs.update({index: kwargs}), with_kwargs=True
        )
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    return [
        recorded(model.model.layers[index].self_attn, inputs[index], cache.layers[index], parts[index])
        for index in range(LAYERS)
    ]


def recorded(module: Any, inputs: dict[str, Any], cached: Any, parts: LayerParts) -> Recorded:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    hidden, rotary = inputs["hidden_states"], inputs["position_embeddings"]
    with torch.inference_mode():
        queries = module.q_proj(hidden).unflatten(-1, (-1, HEAD_DIM))
        queries = module.q_norm(queries) if hasattr(module, "q_norm") else queries
        queries, _ = apply_rotary_pos_emb(queries.transpose(1, 2), queries.transpose(1, 2), *rotary)
    seen = Observation(
        layer=module.layer_idx, n_layers=LAYERS, keys=cached.keys, values=cached.values,
        positions=torch.arange(TOKENS).expand(cached.keys.shape[:3]), new=TOKENS, seen=TOKENS,
        scaling=module.scaling, _draw=0, _queries=queries, _parts=parts, _question=40,
    )  # fmt: skip
    return Recorded(seen, module, hidden, rotary)


def assert_kept(theirs: torch.Tensor, mine: torch.Tensor, kept: torch.Tensor) -> None:
    """The same slots, but for slots that their score does not tell apart: keys of one token in layer 0."""
    worth = [theirs.gather(-1, slots).sort(-1).values for slots in (mine, kept)]
    assert torch.allclose(*worth, rtol=1e-4, atol=1e-6)


def same(
    layers: list[Recorded],
    spec: str,
    press: Any,
    sketched: Callable[[int], Any] = lambda layer: nullcontext(),
    budgets: tuple[int, ...] = BUDGETS,
    model: ModelDescription | None = None,
) -> None:
    """The same slots in every layer, KV head and budget; and not the newest ones."""
    policy = POLICIES.parse(spec)
    policy = policy if model is None else policy.bind(model)
    newest = 0
    with torch.inference_mode():
        for one in layers:
            mine = policy.score(one.seen.limited_to(policy.needs))
            order = rank(mine, one.seen.positions, policy.pins, TOKENS)
            with sketched(one.seen.layer):
                theirs = one.score(press)
            for budget in budgets:
                kept = theirs.topk(budget, dim=-1).indices.sort(-1).values
                assert_kept(theirs, keep(order, budget), kept)
                newest += kept[0].eq(torch.arange(TOKENS - budget, TOKENS)).all(-1).sum().item()
    assert newest < LAYERS * KV_HEADS


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("expected_attention", {}),
        ("expected_attention:covariance=false", {"use_covariance": False}),
        ("expected_attention:values=false", {"use_vnorm": False}),
        (
            "expected_attention:eps=0.01,future=64,sinks=8",
            {"epsilon": 0.01, "n_future_positions": 64, "n_sink": 8},
        ),
    ],
)
def test_expected_attention(layers: list[Recorded], presses: Any, spec: str, settings: dict) -> None:  # noqa: F811
    same(layers, spec, presses.ExpectedAttentionPress(**settings))


@pytest.mark.parametrize("tau", [5.0, 1.0])
def test_cap_kv(layers: list[Recorded], presses: Any, tau: float) -> None:  # noqa: F811
    same(layers, f"cap_kv:tau={tau}", _cap(tau))


def _cap(tau: float) -> Any:
    from kvpress.presses.cap_press import CapPress

    return CapPress(tau=tau)


def ours_for_theirs(layer: int, count: int = 8) -> Any:
    """torch.randn inside kvpress' leverage: our sketch, unscaled, for the layer in work."""
    sketch = (gaussian(layer, KV_HEADS, HEAD_DIM, count) * count**0.5).float()

    def randn(*shape: int, **_: Any) -> torch.Tensor:
        return sketch.expand(shape)

    return patch("torch.randn", randn)


@pytest.mark.parametrize("name", ["leverage", "compactor"])
def test_leverage_and_compactor(layers: list[Recorded], presses: Any, name: str) -> None:  # noqa: F811
    """With our sketch in both, 8 wide, and kvpress' blending fixed at ours."""
    if name == "leverage":
        same(layers, "leverage:sketch=8", presses.LeverageScorePress(sketch_dimension=8), ours_for_theirs)
    else:
        press = presses.CompactorPress(sketch_dimension=8, blending=0.35)
        same(layers, "compactor:sketch=8", _leading(press), ours_for_theirs)


class _leading:
    """kvpress gives the first and last tokens the best score of all, a tie; above it here."""

    def __init__(self, press: Any) -> None:
        self.press = press

    def score(self, *args: Any) -> torch.Tensor:
        score = self.press.score(*args)
        score[..., :8] += 1
        score[..., -4:] += 1
        return score


def test_finch(layers: list[Recorded], presses: Any) -> None:  # noqa: F811
    """The scores alone: kvpress then re-rotates what it keeps."""
    press = presses.FinchPress()
    press.window_size = 40
    same(layers, "finch", _several(press), budgets=BUDGETS[1:])  # that hold the question of 40


class _several:
    """The question's tokens, which tie, in our order."""

    def __init__(self, press: Any) -> None:
        self.press = press

    def score(self, *args: Any) -> torch.Tensor:
        score = self.press.score(*args)
        score[..., -40:] += torch.arange(40) * 1e-3
        return score


@pytest.mark.parametrize("base", ["snapkv:window=16,kernel=5,pooling=avg", "expected_attention:values=false"])
def test_critical_kv(layers: list[Recorded], presses: Any, base: str) -> None:  # noqa: F811
    """kvpress computes one size at a time: each budget is its own press.

    Its SnapKV is a mean over the window, ours a sum, so what is added to it is 16 times as much.
    """
    eps = 16e-4 if "snapkv" in base else 1e-4
    policy = POLICIES.parse(f"critical_kv:base=({base}),eps={eps}")
    with torch.inference_mode():
        for one in layers:
            order = rank(
                policy.score(one.seen.limited_to(policy.needs)), one.seen.positions, policy.pins, TOKENS
            )
            for budget in BUDGETS:
                snap = presses.SnapKVPress(window_size=16, kernel_size=5)
                inner = snap if "snapkv" in base else presses.ExpectedAttentionPress(use_vnorm=False)
                press = presses.CriticalKVPress(inner)
                press.compression_ratio = 1 - (budget + 0.5) / TOKENS  # int() gives the budget back
                theirs = one.score(press)
                kept = theirs.topk(budget, dim=-1).indices.sort(-1).values
                assert_kept(theirs, keep(order, budget), kept)


def test_non_causal_attention(layers: list[Recorded], presses: Any) -> None:  # noqa: F811
    """With tiles that need no padding, in which kvpress lets the padding take part."""
    press = presses.NonCausalAttnPress(chunk_size=131)
    assert TOKENS % 131 == 0
    same(layers, "non_causal_attention:tile=131", press)


def test_expected_attention_with_statistics(
    layers: list[Recorded],
    presses: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The same stored moments; kvpress divides its covariance by one query less, which is no matter here."""
    heads = layers[0].seen._queries.shape[1]
    draw = torch.Generator().manual_seed(3)
    mean = torch.randn(LAYERS, heads, HEAD_DIM, generator=draw)
    root = torch.randn(LAYERS, heads, HEAD_DIM, HEAD_DIM, generator=draw) / HEAD_DIM**0.5
    covariance = root @ root.transpose(-1, -2)
    moments = torch.cat([mean[:, :, None], covariance], 2)
    fits = TrainedFor(LAYERS, KV_HEADS, HEAD_DIM, "5e")
    path = tmp_path / "stats.safetensors"
    write_calibration(path, Calibration({MOMENTS: moments}, fits, {"policy": "expected_attention"}))
    press = presses.ExpectedAttentionStatsPress()
    press.mu, press.cov = mean, covariance
    cpu = torch.device("cpu")
    model = ModelDescription(
        "tiny",
        LAYERS,
        tuple(range(LAYERS)),
        heads,
        KV_HEADS,
        HEAD_DIM,
        None,
        (cpu,) * LAYERS,
        cpu,
        torch.float32,
    )
    placed = [replace(one, seen=replace(one.seen, full_index=one.seen.layer)) for one in layers]
    same(placed, f"expected_attention:stats={path}", press, model=model)


def test_cur(layers: list[Recorded], presses: Any) -> None:  # noqa: F811
    same(layers, "cur", presses.CURPress())


def test_observed_attention(layers: list[Recorded], presses: Any) -> None:  # noqa: F811
    same(layers, "observed_attention", _WithAttention(presses.ObservedAttentionPress()))


class _WithAttention:
    """A press that is given the attention matrix of the layer, as eager attention has it."""

    def __init__(self, press: Any) -> None:
        self._press = press

    def score(self, module: Any, hidden: Any, keys: Any, values: Any, attention: Any, extra: Any) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        queries = module.q_proj(hidden).unflatten(-1, (-1, HEAD_DIM))
        queries = module.q_norm(queries) if hasattr(module, "q_norm") else queries
        turned, _ = apply_rotary_pos_emb(queries.transpose(1, 2), keys, *extra["position_embeddings"])
        logits = turned @ keys.repeat_interleave(turned.shape[1] // KV_HEADS, 1).mT * module.scaling
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        full = logits.masked_fill(later, -torch.inf).softmax(-1)
        return self._press.score(module, hidden, keys, values, full, extra)


@pytest.mark.parametrize(
    ("name", "press"), [("chunk_kv", "ChunkKVPress"), ("entropy_chunk_kv", "EntropyGatedChunkKVPress")]
)
def test_chunks(layers: list[Recorded], presses: Any, name: str, press: str) -> None:  # noqa: F811
    """Whole chunks of 20, as kvpress keeps; KeyDiff, because keys have one norm after QK-norm."""
    policy, tokens = POLICIES.parse(f"{name}:base=keydiff"), 520
    for one in layers:
        keys, values, positions = (
            part[:, :, :tokens] for part in (one.seen.keys, one.seen.values, one.seen.positions)
        )
        seen = replace(one.seen, keys=keys, values=values, positions=positions, new=tokens, seen=tokens)
        with torch.inference_mode():
            order = rank(policy.score(seen.limited_to(policy.needs)), positions, policy.pins, tokens)
            for budget in (60, 140, 320):
                made = getattr(presses, press)(presses.KeyDiffPress())
                made.compression_ratio = 1 - (budget + 0.5) / tokens
                theirs, _ = made.compress(one.module, one.hidden, keys, values, None, {})
                kept = keep(order, budget)[..., None].expand(-1, -1, -1, HEAD_DIM)
                assert torch.equal(keys.gather(2, kept).sort(2).values, theirs.sort(2).values)


@pytest.mark.parametrize("hidden", [None, 24])
def test_kvzap(layers: list[Recorded], presses: Any, tmp_path: Path, hidden: int | None) -> None:  # noqa: F811
    """The same weights in both, the linear form and the MLP."""
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    width = layers[0].hidden.shape[-1]
    torch.manual_seed(0)
    theirs = KVzapModel(
        KVzapConfig(input_dim=width, output_dim=KV_HEADS, hidden_dim=hidden, n_modules=LAYERS)
    ).requires_grad_(False)
    if hidden is None:
        outer = list(theirs.layers)
        inner, inner_bias = torch.zeros(LAYERS, 0, width), torch.zeros(LAYERS, 0)
    else:
        outer = [layer[2] for layer in theirs.layers]
        inner = torch.stack([layer[0].weight for layer in theirs.layers])
        inner_bias = torch.stack([layer[0].bias for layer in theirs.layers])
    weights = torch.stack([layer.weight for layer in outer]), torch.stack([layer.bias for layer in outer])
    tensors = dict(zip(PARTS, (inner, inner_bias, *weights), strict=True))
    path = tmp_path / "kvzap.safetensors"
    fits = TrainedFor(LAYERS, KV_HEADS, HEAD_DIM, "5e")
    write_calibration(path, Calibration(tensors, fits, {"policy": "kvzap"}))
    press = presses.KVzapPress(model_type="linear" if hidden is None else "mlp")
    press.kvzap_model = theirs
    cpu, heads = torch.device("cpu"), layers[0].seen._queries.shape[1]
    model = ModelDescription(
        "tiny",
        LAYERS,
        tuple(range(LAYERS)),
        heads,
        KV_HEADS,
        HEAD_DIM,
        width,
        (cpu,) * LAYERS,
        cpu,
        torch.float32,
    )
    placed = [
        replace(one, seen=replace(one.seen, full_index=one.seen.layer, _hidden=one.hidden)) for one in layers
    ]
    same(placed, f"kvzap:weights={path}", press, model=model)
