"""Answering from a cache: one reading of the question, then every row scores or generates.

All rows read the same question and the same choices, so nothing is padded. The reference
continuation is teacher-forced first; its likelihoods give nll and kl, and on the full cache its
attention gives the future utility of every cached token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Layer, Observer
from .cache import Cache
from .loop import read
from .models import LoadedModel
from .observe import streamed_sums
from .prompt import Continuation, Prompt
from .task import Answer, Sample

LOGITS_LIMIT = 2**28  # bytes of float32 logits alive at once


@dataclass(frozen=True)
class Outcome:
    """What one row answered, and how it predicts the reference continuation.

    nll: nats per scored token, over nll_tokens tokens. kl: nats per token from the full cache's
    prediction, None for the full cache itself.
    """

    answer: Answer
    nll: float
    nll_tokens: int
    kl: float | None


@dataclass
class FutureAttention:
    """Observer of the full cache: u of KVP per layer, summed over the question and the reference.

    utility: layer -> (1, kv_head, context) float32. modules: layer -> (module, scaling).
    """

    context: int
    layers: tuple[int, ...]
    utility: dict[int, Tensor]
    modules: dict[int, tuple[object, float]]

    @classmethod
    def over(cls, context: int, layers: tuple[int, ...]) -> FutureAttention:
        return cls(context, layers, {}, {})

    def __call__(self, layer: Layer) -> None:
        if layer.index not in self.layers:
            return
        keys = layer.bucket.view(layer.index)[0]
        offset = keys.shape[2] - layer.queries.shape[2]
        u = streamed_sums(layer.queries, keys, layer.scaling, offset, "max")[:, :, : self.context]
        known = self.utility.get(layer.index)
        self.utility[layer.index] = u if known is None else known + u
        self.modules[layer.index] = (layer.module, layer.scaling)


def answer_rows(
    lm: LoadedModel, cache: Cache, prompt: Prompt, sample: Sample,
    full_logprobs: Tensor | None = None, observer: Observer | None = None,
) -> tuple[list[Outcome], Tensor]:  # fmt: skip
    """Answer the sample from every row of a cache that holds the (compacted) context.

    full_logprobs: (token, vocabulary) of the full cache over the reference, for kl.
    Returns one outcome per row and the reference's log-probabilities (row 0's, (token, vocabulary)).
    The cache is left as it was.
    """
    mark = cache.mark()
    start = len(prompt.context)
    forced = _teacher_force(lm, cache, prompt, full_logprobs, observer)
    cache.rewind(mark, len(prompt.question))
    position = start + len(prompt.question)
    if prompt.choices:
        answers = _score_choices(lm, cache, prompt, forced, position)
    else:
        answers = _generate(lm, cache, sample, forced.first, position)
    cache.rewind(mark)
    kl = [None] * cache.rows if forced.kl is None else forced.kl.tolist()
    scored = prompt.reference.scored
    outcomes = [
        Outcome(answer, nll, scored, divergence)
        for answer, nll, divergence in zip(answers, forced.nll.tolist(), kl, strict=True)
    ]
    return outcomes, forced.row0


@dataclass
class _Forced:
    """Teacher forcing of the reference: first (row, vocabulary) logits after the question; token
    log-likelihoods and greedy hits (row, token); nll and kl (row,); row 0's log-probabilities."""

    first: Tensor
    tokens: Tensor
    greedy: Tensor
    nll: Tensor
    kl: Tensor | None
    row0: Tensor


def _teacher_force(
    lm: LoadedModel, cache: Cache, prompt: Prompt, full_logprobs: Tensor | None, observer: Observer | None
) -> _Forced:
    """Read question and reference in blocks, keeping only what the metrics need."""
    reference = torch.tensor(prompt.reference.ids, device=lm.device)
    ids = torch.tensor([*prompt.question, *prompt.reference.ids], device=lm.device)
    lead = len(prompt.question) - 1  # logits from this token on predict the reference
    block = max(1, LOGITS_LIMIT // (4 * cache.rows * lm.model.config.vocab_size))
    first: Tensor | None = None
    tokens: list[Tensor] = []
    greedy: list[Tensor] = []
    kl: list[Tensor] = []
    row0: list[Tensor] = []
    # The last reference token predicts nothing, but on the full cache its attention is observed.
    stop = len(ids) if observer is not None else len(ids) - 1
    begin = 0
    while begin < stop:
        end = min(stop, max(begin + block, lead + 1) if begin == 0 else begin + block)
        wanted = end - max(begin, lead)
        logits = read(
            lm, cache, ids[begin:end], len(prompt.context) + begin, keep_logits=wanted, observer=observer
        )  # fmt: skip
        logits = logits[:, : min(end, len(ids) - 1) - max(begin, lead)].float()
        if first is None:
            first = logits[:, 0].clone()
        done = sum(part.shape[1] for part in tokens)
        target = reference[done : done + logits.shape[1]]
        logprobs = logits.log_softmax(-1)
        tokens.append(logprobs.gather(2, target.expand(cache.rows, -1)[..., None])[..., 0])
        greedy.append(logprobs.argmax(-1) == target)
        if full_logprobs is not None:
            full = full_logprobs[done : done + logits.shape[1]]
            kl.append((full.exp() * (full - logprobs)).sum(-1))
        else:
            row0.append(logprobs[0])
        begin = end
    assert first is not None
    scored = torch.cat(tokens, 1)[:, -prompt.reference.scored :]
    return _Forced(
        first=first,
        tokens=torch.cat(tokens, 1),
        greedy=torch.cat(greedy, 1),
        nll=-scored.mean(1),
        kl=torch.cat(kl, 1)[:, -prompt.reference.scored :].mean(1).clamp(min=0) if kl else None,
        row0=torch.cat(row0) if row0 else first.new_empty(0),
    )


def _score_choices(
    lm: LoadedModel, cache: Cache, prompt: Prompt, forced: _Forced, position: int
) -> list[Answer]:  # fmt: skip
    """Log-likelihood of every choice, from the cache right after the question."""
    after_question = cache.mark()
    likelihoods, greedy = [], []
    for choice in prompt.choices:
        if choice.ids == prompt.reference.ids:
            tokens, hits = forced.tokens, forced.greedy
        else:
            tokens, hits = _continue(lm, cache, choice, forced.first, position)
            cache.rewind(after_question)
        likelihoods.append(tokens[:, -choice.scored :].sum(1))
        greedy.append(hits[:, -choice.scored :].all(1))
    columns = zip(torch.stack(likelihoods, 1).tolist(), torch.stack(greedy, 1).tolist(), strict=True)
    return [Answer(loglikelihoods=tuple(values), greedy=tuple(hits)) for values, hits in columns]


def _continue(
    lm: LoadedModel, cache: Cache, choice: Continuation, first: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Token log-likelihoods and greedy hits (row, token) of one choice."""
    ids = torch.tensor(choice.ids, device=lm.device)
    logits = first[:, None]
    if len(ids) > 1:
        rest = read(lm, cache, ids[:-1], position, keep_logits=len(ids) - 1)
        logits = torch.cat([logits, rest.float()], 1)
    logprobs = logits.log_softmax(-1)
    tokens = logprobs.gather(2, ids.expand(cache.rows, -1)[..., None])[..., 0]
    return tokens, logprobs.argmax(-1) == ids


def _generate(
    lm: LoadedModel, cache: Cache, sample: Sample, first: Tensor, position: int
) -> list[Answer]:  # fmt: skip
    """Greedy decoding of all rows in lockstep; rows that ended leave the batch once half have."""
    texts = [""] * cache.rows
    alive = list(range(cache.rows))  # original row of each batch row
    produced: list[list[int]] = [[] for _ in range(cache.rows)]
    finished = [False] * cache.rows
    logits = first
    for step in range(sample.max_new_tokens):
        token = logits.argmax(-1)  # (row,)
        for i, value in enumerate(token.tolist()):
            row = alive[i]
            if finished[row]:
                continue
            if value in lm.eos_ids:
                finished[row] = True
                continue
            produced[row].append(value)
            texts[row] = lm.tokenizer.decode(produced[row], skip_special_tokens=True)
            finished[row] = any(stop in texts[row] for stop in sample.stop)
        going = [i for i, row in enumerate(alive) if not finished[row]]
        if not going or step + 1 == sample.max_new_tokens:
            break
        if len(going) <= len(alive) // 2:
            cache = cache.take_rows(going)
            token = token[torch.tensor(going, device=token.device)]
            alive = [alive[i] for i in going]
        logits = read(lm, cache, token[:, None], position + step)[:, -1].float()
    return [Answer(text=_cut(text, sample.stop)) for text in texts]


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text
