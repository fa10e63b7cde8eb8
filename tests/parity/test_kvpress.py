"""Kept sets of our policies and of kvpress 0.5 on the same keys, values and queries of a real model.

Where a documented convention differs, the test's name or docstring says which, and the comparison
is made after removing it. Needs the package kvpress, which is no dependency of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.engine.order import keep, rank
from kvbench.model.open import LoadedModel
from kvbench.policies.keydiff import KeyDiff
from kvbench.policies.knorm import KNorm
from kvbench.policies.lagkv import LagKV
from kvbench.policies.snapkv import SnapKV
from kvbench.policies.streaming_llm import StreamingLLM
from kvbench.policies.tova import TOVA

pytestmark = pytest.mark.model

TOKENS = 700
LAYERS = (0, 7, 15, 29)
BUDGETS = (64, 128, 256, 512)
NEAR = 1e-6  # relative: two float32 sums in another order


@dataclass
class Recorded:
    """One layer of a plain forward pass. hidden: what the attention module received."""

    seen: Observation
    module: Any
    hidden: Tensor
    rotary: tuple[Tensor, Tensor]

    def score(self, press: Any) -> Tensor:
        """kvpress' score of the same layer: (batch, kv_head, slot)."""
        seen, extra = self.seen, {"position_embeddings": self.rotary}
        return press.score(self.module, self.hidden, seen.keys, seen.values, None, extra)


@pytest.fixture(scope="module")
def presses() -> Any:
    """kvpress' classes. Importing it wraps every attention function of transformers: undone here."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        kvpress = pytest.importorskip("kvpress")
    finally:
        for name, function in before.items():
            ALL_ATTENTION_FUNCTIONS[name] = function
    return kvpress


@pytest.fixture(scope="module")
def layers(smol: LoadedModel) -> list[Recorded]:
    """Four layers of SmolLM2-135M reading 700 tokens of English, recorded without our engine."""
    from pydoc_data.topics import topics

    ids = smol.tokenizer(topics["exceptions"] + topics["naming"], return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape[1] == TOKENS
    inputs: dict[int, Any] = {}
    attentions = {layer: smol.model.model.layers[layer].self_attn for layer in LAYERS}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, layer=layer: inputs.update({layer: kwargs}), with_kwargs=True
        )
        for layer, module in attentions.items()
    ]
    own = smol.model.config._attn_implementation
    smol.model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            cache = smol.model(ids.to(smol.device), use_cache=True).past_key_values
    finally:
        smol.model.set_attn_implementation(own)
        for hook in hooks:
            hook.remove()
    return [recorded(smol, layer, inputs[layer], cache.layers[layer]) for layer in LAYERS]


def recorded(smol: LoadedModel, layer: int, inputs: dict[str, Any], cached: Any) -> Recorded:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    module = smol.model.model.layers[layer].self_attn
    hidden, rotary = inputs["hidden_states"], inputs["position_embeddings"]
    with torch.inference_mode():
        queries = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        queries, _ = apply_rotary_pos_emb(queries, queries, *rotary)
    seen = Observation(
        layer=layer,
        n_layers=smol.geometry.layers,
        keys=cached.keys,
        values=cached.values,
        positions=torch.arange(TOKENS, device=hidden.device).expand(cached.keys.shape[:3]),
        new=TOKENS,
        seen=TOKENS,
        scaling=module.scaling,
        _draw=0,
        _queries=queries,
    )
    return Recorded(seen, module, hidden, rotary)


def ours(policy: Policy, seen: Observation, budget: int, pins: Pins | None = None) -> list[list[int]]:
    score = policy.score(seen.limited_to(policy.needs))
    order = rank(score, seen.positions, policy.pins if pins is None else pins, seen.seen)
    return keep(order, budget)[0].tolist()


def theirs(score: Tensor, budget: int) -> list[list[int]]:
    """Top of their score. Their topk leaves ties open (in layer 0 a repeated token has one key norm);
    in double precision a step far below fp32 resolution gives ties to the newer position."""
    newer = torch.arange(TOKENS, dtype=torch.float64, device=score.device) * 1e-12
    return (score.double() + newer).topk(budget, dim=-1).indices.sort(-1).values[0].tolist()


@pytest.mark.parametrize("budget", BUDGETS)
def test_knorm(layers: list[Recorded], presses: Any, budget: int) -> None:
    for one in layers:
        assert ours(KNorm(), one.seen, budget) == theirs(one.score(presses.KnormPress()), budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_keydiff(layers: list[Recorded], presses: Any, budget: int) -> None:
    for one in layers:
        assert ours(KeyDiff(), one.seen, budget) == theirs(one.score(presses.KeyDiffPress()), budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_snapkv_with_the_parameters_of_kvpress(layers: list[Recorded], presses: Any, budget: int) -> None:
    """kvpress: window 64, kernel 5, average pooling; ours: the official LongBench configuration."""
    policy = SnapKV(window=64, kernel=5, pooling="avg")
    for one in layers:
        assert ours(policy, one.seen, budget) == theirs(one.score(presses.SnapKVPress()), budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_snapkv_with_our_window_and_kernel(layers: list[Recorded], presses: Any, budget: int) -> None:
    """Max pooling is not in kvpress: average pooling with window 32 and kernel 7 on both sides."""
    press = presses.SnapKVPress(window_size=32, kernel_size=7)
    for one in layers:
        assert ours(SnapKV(pooling="avg"), one.seen, budget) == theirs(one.score(press), budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_tova_with_the_last_token_pinned(layers: list[Recorded], presses: Any, budget: int) -> None:
    """kvpress always keeps the last token, the official code and ours do not."""
    for one in layers:
        kept = theirs(one.score(presses.TOVAPress()), budget)
        assert ours(TOVA(), one.seen, budget, Pins(last=1)) == kept


@pytest.mark.parametrize("budget", BUDGETS)
def test_streaming_llm_kept_sets_of_a_binary_score(layers: list[Recorded], presses: Any, budget: int) -> None:
    """kvpress marks the kept with 1 at one ratio; the budget is counted, since its product may round down."""
    press = presses.StreamingLLMPress(compression_ratio=1 - budget / TOKENS)
    for one in layers:
        kept = one.score(press)[0].bool()
        count = int(kept[0].sum())
        assert budget - 1 <= count <= budget
        positions = [head.nonzero().flatten().tolist() for head in kept]
        assert ours(StreamingLLM(), one.seen, count) == positions


@pytest.mark.parametrize("lag", [128, 64, 300, 400])
def test_lagkv_scores(layers: list[Recorded], presses: Any, lag: int) -> None:
    """The same number for every token; 400 is the case in which the paper evicts nothing.

    A score is a rank inside a partition. Two tokens whose spreads are equal up to rounding may change places
    from one kind of processor to another, and nothing else may.
    """
    for one in layers:
        policy = LagKV(lag=lag)
        score, theirs = policy.score(one.seen), one.score(presses.LagKVPress(lag_size=lag))
        differs = (score - theirs).abs() > 1e-6
        if not differs.any():
            continue
        assert (score - theirs).abs().max() < 1.5 / lag  # neighbours in rank
        end = policy.sinks + (TOKENS - policy.sinks) // lag * lag
        spread = sum(
            policy._spread(x[:, :, policy.sinks : end].double()) for x in (one.seen.keys, one.seen.values)
        ).flatten(2)
        for head in range(score.shape[1]):
            slots = differs[0, head].nonzero().flatten()
            near = spread[0, head, slots - policy.sinks].sort().values.view(-1, 2)  # swapped in pairs
            assert (near.diff(dim=-1) < NEAR * near.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("budget", BUDGETS)
def test_lagkv_with_ties_broken(layers: list[Recorded], presses: Any, budget: int) -> None:
    """kvpress leaves sinks, tail and equal ranks tied; ours puts sinks first, then the newer token."""
    for one in layers:
        score = one.score(presses.LagKVPress())
        score[..., :4] += 1.0
        assert ours(LagKV(), one.seen, budget) == theirs(score, budget)
