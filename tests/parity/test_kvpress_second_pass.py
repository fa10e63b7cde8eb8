"""Kept sets of KVzip, KVzip+ and KVCompose, and those of kvpress 0.5.5, which runs its own second pass.

Real text, every layer of a Llama and of a Qwen3 with QK-norm, random weights. Removed here: their sinks are
put on top of the finished scores (ours are pins), and budgets are even (theirs cut over heads and layers).
Their KVCompose with value norms fails (it multiplies with the norms of both readings), so that is not here.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvbench.contract.cell import Ranker
from kvbench.contract.pins import Pins
from kvbench.contract.registry import POLICIES
from kvbench.contract.second_pass import ContextText
from kvbench.engine.bind import bind_policies
from kvbench.engine.cache import Cache
from kvbench.engine.observe import Moment
from kvbench.engine.order import keep
from kvbench.engine.passes import read_and_rank
from tests.parity.test_kvpress import presses  # noqa: F401
from tests.tiny import KV_HEADS, LAYERS, tiny_loaded, tiny_model, tiny_tokenizer

TOKENS = 500
BUDGETS = (32, 64, 128, 256, 400)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return tiny_tokenizer()(topics["exceptions"] + topics["naming"], return_tensors="pt").input_ids[
        :, :TOKENS
    ]


def ours(arch: str, spec: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Order and score, (layer, kv_head, slot); nothing pinned."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])

    lm, ranker = tiny_loaded(arch), Ranker(POLICIES.parse(spec), Pins())
    moment = Moment(TOKENS, TOKENS, 0, text=ContextText(tuple(ids[0].tolist()), 0, encode("\n"), encode))
    bound = bind_policies(lm, [ranker.policy])
    with torch.inference_mode():
        found, _ = read_and_rank(bound, Cache.empty(LAYERS, TOKENS), ids[0], [[ranker]], moment)
    return found.found[0, ranker].order, found.found[0, ranker].score


def theirs(arch: str, press: Any, capture: str, ids: Tensor, attention: str) -> Tensor:
    """The scores of a press that runs its own passes, as they are before its sinks and its cut."""
    found: list[Tensor] = []

    def note(self: Any, *args: Any) -> None:
        scores = self.score_val[:, 0] if hasattr(self, "score_val") else self.scores
        found.append(scores.clone())

    model = tiny_model(arch, attention)
    model.config.name_or_path = "tiny"
    with (
        patch("kvpress.presses.kvzip_press.AutoTokenizer.from_pretrained", lambda name: tiny_tokenizer()),
        patch.object(type(press), capture, note),
        torch.inference_mode(),
        press(model),
    ):
        model(input_ids=ids, past_key_values=DynamicCache())
    assert found[0].shape == (LAYERS, KV_HEADS, TOKENS)
    return found[0]


def same(found: tuple[Tensor, Tensor], expected: Tensor) -> None:
    """The same slots everywhere, but for those that their score does not tell apart."""
    order, score = found
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=1e-4)
    newest = 0
    for budget in BUDGETS:
        kept = expected.topk(budget, dim=-1).indices.sort(-1).values
        worth = [expected.gather(-1, slots).sort(-1).values for slots in (keep(order, budget), kept)]
        torch.testing.assert_close(*worth, atol=1e-6, rtol=1e-4)
        newest += kept.eq(torch.arange(TOKENS - budget, TOKENS)).all(-1).sum().item()
    assert newest < LAYERS * KV_HEADS


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("chunk", [2048, 190])
@pytest.mark.parametrize("plus", [False, True])
def test_kvzip(arch: str, chunk: int, plus: bool, ids: Tensor, presses: Any) -> None:  # noqa: F811
    press = presses.KVzipPress(
        compression_ratio=0.5, layerwise=True, chunk_size=chunk, kvzip_plus_normalization=plus
    )
    expected = theirs(arch, press, "compress_post", ids, "sdpa")
    order, score = ours(arch, f"kvzip:chunk={chunk},plus={plus}", ids)
    if chunk < TOKENS:  # ours also counts what later pieces pay to the sinks
        assert (score[..., :4] >= expected[..., :4] - 1e-5).all()
        score = torch.cat([expected[..., :4], score[..., 4:]], -1)
        order = score.argsort(dim=-1, descending=True, stable=True)
    same((order, score), expected)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("kv_compose", {}),
        ("kv_compose:over_tokens=mean", {"agg_task": "mean"}),
    ],
)
def test_kv_compose(arch: str, spec: str, settings: dict[str, Any], ids: Tensor, presses: Any) -> None:  # noqa: F811
    press = presses.KVComposePress(compression_ratio=0.5, **settings)
    expected = theirs(arch, press, "compress_cache", ids, "eager")
    same(ours(arch, spec, ids), expected)
