"""One trace: a prompt and its reference, read once, with what every evicted layer computed.

In: a LoadedModel, a prompt, and the cell that its context is cut to, if any. Out: queries, keys and values.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..contract.cell import Cell
from ..contract.draws import draw_key
from ..engine.attention import Layer
from ..engine.bind import bind_policies
from ..engine.cache import Cache
from ..engine.forward import read
from ..engine.hidden import recorded_hidden
from ..engine.observe import Moment
from ..engine.passes import read_and_rank
from ..engine.selection import evict
from ..errors import BadInput
from ..model.context_text import context_text
from ..model.lm import LoadedModel
from ..model.prompt import Continuation, Prompt

# Per layer q, k, v, and hidden states where they are wanted; the factor on logits; the token ids.
Recording = tuple[list[tuple[Tensor, ...]], float, tuple[int, ...]]


class _Recorder:
    """Observer that keeps queries, keys and values of the full-attention layers.

    hidden: layer -> what its attention module received, filled from outside while the layer is read, where it
    is to be kept, too.
    """

    def __init__(self, layers: tuple[int, ...], dtype: torch.dtype) -> None:
        self.layers = layers
        self.dtype = dtype
        self.hidden: dict[int, Tensor] = {}
        self.parts: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in layers}
        self.scaling = 0.0

    def __call__(self, layer: Layer) -> None:
        if layer.index not in self.parts:
            return
        keys, values, _ = layer.bucket.view(layer.index)
        new = layer.queries.shape[2]
        part = [layer.queries[0], keys[0, :, -new:], values[0, :, -new:]]
        part += [self.hidden[layer.index]] if layer.index in self.hidden else []  # (1, new, d_model)
        self.parts[layer.index].append(tuple(t.to("cpu", self.dtype, copy=True) for t in part))
        self.scaling = layer.scaling

    def finish(self) -> list[tuple[Tensor, ...]]:
        """Per full layer: queries, keys, values (and hidden states) of the whole sequence."""
        return [
            tuple(torch.cat(pieces, 1) for pieces in zip(*self.parts[layer], strict=True))
            for layer in self.layers
        ]


@torch.inference_mode()
def answer_prompt(lm: LoadedModel, prompt: Prompt) -> Prompt:
    """The prompt with the model's own greedy answer as reference: as long as the given one at most."""
    with lm.rotation.whole(len(prompt.context) + prompt.room(0)):
        answer = _write_answer(lm, prompt)
    return replace(prompt, reference=Continuation(tuple(answer), len(answer)))


def _write_answer(lm: LoadedModel, prompt: Prompt) -> list[int]:
    start = len(prompt.context) + len(prompt.question)
    cache = Cache.empty(lm.geometry.layers, start + len(prompt.reference.ids))
    ids = torch.tensor([*prompt.context, *prompt.question], device=lm.device)
    answer: list[int] = []
    while len(answer) < len(prompt.reference.ids):
        position = start + len(answer) - 1 if answer else 0
        token = int(read(lm, cache, ids, position)[0, -1].argmax())
        if token in lm.eos_ids:
            break
        answer.append(token)
        ids = torch.tensor([token], device=lm.device)
    return answer


@torch.inference_mode()
def record(
    lm: LoadedModel, prompt: Prompt, dtype: torch.dtype, eviction: Cell | None, name: str,
    hidden: bool = False,
) -> Recording:  # fmt: skip
    """One prompt followed by its reference: queries, keys, values per full-attention layer; scaling; ids.

    hidden: also what each attention module received, (1, token, d_model).
    """
    tokens = len(prompt.context) + len(prompt.question) + len(prompt.reference.ids)
    recorder = _Recorder(lm.geometry.full_layers, dtype)
    noting = recorded_hidden(lm, recorder.hidden) if hidden else nullcontext()
    with lm.rotation.whole(tokens), noting:
        return _record(lm, prompt, recorder, eviction, name)


def _record(
    lm: LoadedModel, prompt: Prompt, recorder: _Recorder, eviction: Cell | None, name: str
) -> Recording:
    context = torch.tensor(prompt.context, dtype=torch.int64, device=lm.device)
    rest = torch.tensor([*prompt.question, *prompt.reference.ids], device=lm.device)
    ids = (*prompt.context, *prompt.question, *prompt.reference.ids)
    cache = Cache.empty(lm.geometry.layers, len(context) + len(rest))
    if eviction is None or not prompt.context:
        read(lm, cache, torch.cat([context, rest]), 0, observer=recorder)
        return recorder.finish(), recorder.scaling, ids
    bound = bind_policies(lm, [eviction.ranker.policy])
    if bound.failures:
        raise BadInput(next(iter(bound.failures.values())))
    text = context_text(lm.tokenizer, prompt)
    moment = Moment(len(context), len(context), draw_key(name), None, prompt.asked, text)
    rankings, _ = read_and_rank(bound, cache, context, [[eviction.ranker]], moment, recorder)
    if rankings.failures:
        raise BadInput(next(iter(rankings.failures.values())))
    cache, _ = evict(lm, cache, [eviction], [0], rankings, len(rest))
    read(lm, cache, rest, len(context), observer=recorder)
    return recorder.finish(), recorder.scaling, ids
