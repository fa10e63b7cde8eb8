"""Answering from a cache: question, reference, choices and a draft in one pass, then what rows still write.

The reference continuation is teacher-forced; its likelihoods give nll and kl, and on the full cache its
attention gives the future utility of every cached token. All rows read the same tokens, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contract.attention_sums import streamed_sums
from ..contract.task import Answer, Sample
from ..model.open import LoadedModel
from ..model.prompt import Prompt
from .attention import Layer, Observer
from .cache import Cache
from .forward import Tokens, read_tokens
from .tree import Tree
from .write import Known, Line, write

LOGITS_LIMIT = 2**28  # bytes of float32 logits alive at once
AT_ONCE = {"cpu": 1024}  # tokens of all rows in one forward: more is no faster there, and takes memory
MUCH_AT_ONCE = 2**14
DRAFT = 32  # tokens of the full cache's answer, beyond the reference, that all rows read as a draft


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

    context, future: tokens of the context, and of question and reference behind it; what is read behind those
    does not count. utility: layer -> (1, kv_head, context) float32. modules: layer -> (module, scaling).
    """

    context: int
    future: int
    layers: tuple[int, ...]
    utility: dict[int, Tensor]
    modules: dict[int, tuple[object, float]]

    @classmethod
    def over(cls, prompt: Prompt, layers: tuple[int, ...]) -> FutureAttention:
        future = len(prompt.question) + len(prompt.reference.ids)
        return cls(len(prompt.context), future, layers, {}, {})

    def __call__(self, layer: Layer) -> None:
        if layer.index not in self.layers:
            return
        keys = layer.bucket.view(layer.index)[0][:, :, : self.context + self.future]
        offset = layer.bucket.filled[layer.index] - layer.queries.shape[2]
        if offset >= keys.shape[2]:
            return
        queries = layer.queries[:, :, : keys.shape[2] - offset]
        u = streamed_sums(queries, keys, layer.scaling, offset, "max")[:, :, : self.context]
        known = self.utility.get(layer.index)
        self.utility[layer.index] = u if known is None else known + u
        self.modules[layer.index] = (layer.module, layer.scaling)


@dataclass(frozen=True)
class Asked:
    """What every row of a cache is asked. draft: read likely answers ahead; they change no result."""

    lm: LoadedModel
    prompt: Prompt
    sample: Sample
    draft: bool = True


@dataclass(frozen=True)
class Answered:
    """outcomes: one per row. logprobs: (token, vocabulary) of the full cache over the reference. written: the
    tokens of row 0's answer, the one that ended it included."""

    outcomes: list[Outcome]
    logprobs: Tensor | None
    written: list[int]


def answer_rows(
    asked: Asked, cache: Cache, full: Answered | None = None, observer: Observer | None = None
) -> Answered:
    """Answer the sample from every row of a cache that holds the (compacted) context.

    full: what the full cache answered, for kl and as a draft; None when this is the full cache. observer:
    looks at the layers while question and reference are read. The cache is left as it was.
    """
    mark = cache.mark()
    plan = _Plan.of(asked, full, whole=observer is not None)
    cache.reserve(len(plan.tree))
    most = max(1, AT_ONCE.get(asked.lm.device.type, MUCH_AT_ONCE) // len(plan.tree))
    found = _Found.joined([_read(asked, piece, plan, full, observer) for piece in cache.pieces(most)])
    cache.rewind(mark)
    lines: list[Line] = []
    predicted = found.predicted.tolist()
    if not asked.prompt.choices:
        known = Known(plan.tree, len(asked.prompt.context), predicted)
        lines = write(asked.lm, cache, asked.sample, known, asked.draft)
        cache.rewind(mark)
    texts = [line.text(asked.lm, asked.sample) for line in lines]
    answers = [Answer(text=text) for text in texts] or [_choice(plan, asked.prompt, row) for row in predicted]
    outcomes = _outcomes(asked.prompt, found, answers)
    return Answered(outcomes, found.logprobs, lines[0].tokens if lines else [])


@dataclass(frozen=True)
class _Plan:
    """What is read behind the context, and which of its predictions count.

    scored: reference, then choices; per continuation its (node, the token it should predict). last: nodes
    from here on predict nothing but a draft.
    """

    tree: Tree
    scored: list[list[tuple[int, int]]]
    last: int

    @classmethod
    def of(cls, asked: Asked, full: Answered | None, whole: bool) -> _Plan:
        """whole: read the last token of the reference, too, which predicts nothing but has attention."""
        tree = Tree.of(asked.prompt.question)
        scored: list[list[tuple[int, int]]] = []
        for part in (asked.prompt.reference, *asked.prompt.choices):
            nodes = tree.add(part.ids if whole and not scored else part.ids[:-1])
            scored.append(list(zip(nodes, part.ids, strict=False)))
        last = len(tree)
        if asked.draft and full is not None and full.written:
            shared = _shared(full.written, asked.prompt.reference.ids)
            tree.add(full.written[: shared + DRAFT][:-1])
        return cls(tree, scored, last)


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


@dataclass
class _Found:
    """Predictions of every row.

    tokens: per continuation (row, token) log-likelihoods. divergence: (row, token) KL from the full cache
    over the reference. logprobs: row 0's over the reference, of the full cache only. predicted: (row, node)
    the likeliest token after each node from the root on.
    """

    tokens: list[Tensor]
    divergence: Tensor | None
    logprobs: Tensor | None
    predicted: Tensor

    @classmethod
    def joined(cls, parts: list[_Found]) -> _Found:
        """Rows that were read in pieces."""
        divergences = [part.divergence for part in parts if part.divergence is not None]
        return cls(
            tokens=[torch.cat(pieces) for pieces in zip(*(part.tokens for part in parts), strict=True)],
            divergence=torch.cat(divergences) if divergences else None,
            logprobs=parts[0].logprobs,
            predicted=torch.cat([part.predicted for part in parts]),
        )


def _read(
    asked: Asked, cache: Cache, plan: _Plan, full: Answered | None, observer: Observer | None
) -> _Found:
    """Read the tree in blocks, keeping only what the metrics need."""
    lm, tree, context = asked.lm, plan.tree, len(asked.prompt.context)
    ids = torch.tensor(tree.ids, device=lm.device)
    positions = torch.tensor(tree.depth, device=lm.device) + context
    pairs = [pair for part in plan.scored for pair in part]
    tokens = torch.empty(cache.rows, len(pairs), device=lm.device)
    reference = len(plan.scored[0])
    block = max(1, LOGITS_LIMIT // (4 * cache.rows * lm.model.config.vocab_size))
    predicted, kl, row0 = [], [], []
    begin = 0
    while begin < len(tree):
        first = max(begin, tree.root)  # earlier tokens of the question predict nothing that counts
        end = min(len(tree), first + block)
        wanted = torch.arange(first - begin, end - begin, device=lm.device)
        new = Tokens(positions[begin:end], tree.visible(begin, end), wanted)
        logits = read_tokens(lm, cache, ids[begin:end], new, observer).float()
        predicted.append(logits.argmax(-1))
        if first < plan.last:
            logprobs = logits[:, : plan.last - first].log_softmax(-1)
            here = [(i, node - first, token) for i, (node, token) in enumerate(pairs) if first <= node < end]
            place, node, target = torch.tensor(here, dtype=torch.int64, device=lm.device).view(-1, 3).T
            tokens[:, place] = logprobs[:, node, target]
            span = slice(first - tree.root, min(end - tree.root, reference))  # the reference comes first
            if full is None:
                row0.append(logprobs[0, : max(0, span.stop - span.start)])
            else:
                assert full.logprobs is not None
                kl.append(_divergence(full.logprobs[span], logprobs))
        begin = end
    return _Found(
        tokens=list(tokens.split([len(part) for part in plan.scored], 1)),
        divergence=torch.cat(kl, 1) if kl else None,
        logprobs=torch.cat(row0) if row0 else None,
        predicted=torch.cat(predicted, 1),
    )


def _divergence(full: Tensor, logprobs: Tensor) -> Tensor:
    """KL from the full cache: (token, vocabulary), (row, token or more, vocabulary) -> (row, token)."""
    return (full - logprobs[:, : full.shape[0]]).mul_(full.exp()).sum(-1)


def _outcomes(prompt: Prompt, found: _Found, answers: list[Answer]) -> list[Outcome]:
    """One outcome per row; the host reads the numbers of all rows at once."""
    scored = prompt.reference.scored
    parts = zip(found.tokens[1:], prompt.choices, strict=True)
    sums = [tokens[:, -choice.scored :].sum(1) for tokens, choice in parts]
    nll = -found.tokens[0][:, -scored:].mean(1)
    kl = nll if found.divergence is None else found.divergence[:, -scored:].mean(1).clamp(min=0)
    outcomes = []
    numbers = torch.stack([nll, kl, *sums], 1).tolist()
    for answer, (loss, divergence, *likelihoods) in zip(answers, numbers, strict=True):
        answer = replace(answer, loglikelihoods=tuple(likelihoods))
        outcomes.append(Outcome(answer, loss, scored, None if found.divergence is None else divergence))
    return outcomes


def _choice(plan: _Plan, prompt: Prompt, predicted: list[int]) -> Answer:
    """An answer that is a choice: would greedy decoding write it? Its likelihoods come later."""
    parts = zip(plan.scored[1:], prompt.choices, strict=True)
    greedy = (
        all(predicted[node - plan.tree.root] == token for node, token in pairs[-choice.scored :])
        for pairs, choice in parts
    )
    return Answer(greedy=tuple(greedy))
