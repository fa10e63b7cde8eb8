"""Contexts of traces, read again by their model: hidden states, and what a policy says of every token.

In: the model, ids, a policy. Out: tensors on the CPU. For trainers whose targets are another policy's scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract.cell import Ranker
from ..contract.pins import Pins
from ..contract.policy import Policy
from ..engine.attention import Layer
from ..engine.bind import bind_policies
from ..engine.cache import Cache
from ..engine.hidden import recorded_hidden
from ..engine.observe import Moment
from ..engine.passes import read_and_rank
from ..errors import BadInput
from ..model.context_text import context_text
from ..model.lm import LoadedModel
from ..model.prompt import Continuation, Prompt, uses_chat


@dataclass(frozen=True, eq=False)
class Reread:
    """hidden: per full layer, what its attention module received, (token, d_model) float32. score:
    (full_layer, kv_head, token) float32."""

    hidden: list[Tensor]
    score: Tensor


@torch.inference_mode()
def reread(lm: LoadedModel, ids: Sequence[int], policy: Policy) -> Reread:
    """Read a context and score its tokens. Raises BadInput with the reason where the policy fails."""
    ranker = Ranker(policy, Pins())
    hidden: dict[int, Tensor] = {}
    found: dict[int, Tensor] = {}
    bound = bind_policies(lm, [policy])
    if bound.failures:
        raise BadInput(bound.failures[policy])

    def observer(layer: Layer) -> None:
        if layer.index in lm.geometry.full_layers:
            found[layer.index] = hidden[layer.index][0].float().cpu()

    ids = tuple(ids)  # of a trace they are a list
    prompt = Prompt(ids, (), (), Continuation((ids[-1],), 1), chat=uses_chat(lm.tokenizer, "auto"))
    moment = Moment(len(ids), len(ids), 0, text=context_text(lm.tokenizer, prompt))
    tokens = torch.tensor(ids, device=lm.device)
    with lm.rotation.whole(len(ids)), recorded_hidden(lm, hidden):
        cache = Cache.empty(lm.geometry.layers, len(ids))
        rankings, _ = read_and_rank(bound, cache, tokens, [[ranker]], moment, observer)
    if rankings.failures:
        raise BadInput(next(iter(rankings.failures.values())))
    layers = [found[layer] for layer in lm.geometry.full_layers]
    return Reread(layers, rankings.found[0, ranker].score.float().cpu())
