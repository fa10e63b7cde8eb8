"""Answering from a cache: question, reference, choices and a draft in one pass, then what rows still write.

In: a cache whose rows hold the context. Out: each row's answer, and how it predicts the reference. The
reference continuation is teacher-forced; its likelihoods give nll and kl, and on the full cache its attention
gives the future utility of every cached token. All rows read the same tokens, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contract.task import Answer, Sample
from ..model.lm import LoadedModel
from ..model.prompt import Prompt
from .attention import Observer
from .cache import Cache
from .forward import Tokens, read_tokens
from .tree import Tree
from .write import Line, Lookahead, write

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


@dataclass(frozen=True)
class AnswerRequest:
    """What every row of a cache is asked. draft: read likely answers ahead; they change no result."""

    lm: LoadedModel
    prompt: Prompt
    sample: Sample
    draft: bool = True

    @property
    def tokens(self) -> int:
        """Of the whole sample: the prompt and what may follow."""
        return len(self.prompt.context) + self.prompt.room(self.sample.max_new_tokens)


@dataclass(frozen=True)
class AnswerSet:
    """outcomes: one per row. logprobs: (token, vocabulary) of the full cache over the reference. written: the
    tokens of row 0's answer, the one that ended it included."""

    outcomes: list[Outcome]
    logprobs: Tensor | None
    written: list[int]


def answer_rows(
    request: AnswerRequest, cache: Cache, full: AnswerSet | None = None, observer: Observer | None = None
) -> AnswerSet:
    """Answer the sample from every row of a cache that holds the (compacted) context.

    full: what the full cache answered, for kl and as a draft; None when this is the full cache. observer:
    looks at the layers while question and reference are read. The cache is left as it was.
    """
    mark = cache.mark()
    plan = _ReadingPlan.of(request, full, whole=observer is not None)
    cache.reserve(len(plan.tree))
    most = max(1, AT_ONCE.get(request.lm.device.type, MUCH_AT_ONCE) // len(plan.tree))
    found = _Predictions.join([_read(request, piece, plan, full, observer) for piece in cache.pieces(most)])
    cache.rewind(mark)
    lines: list[Line] = []
    predicted = found.predicted.tolist()
    if not request.prompt.choices:
        known = Lookahead(plan.tree, len(request.prompt.context), predicted)
        lines = write(request.lm, cache, request.sample, known, request.draft)
        cache.rewind(mark)
    texts = [line.text(request.lm, request.sample) for line in lines]
    answers = [Answer(text=text) for text in texts]
    answers = answers or [_choose(plan, request.prompt, row) for row in predicted]
    outcomes = _make_outcomes(request.prompt, found, answers)
    return AnswerSet(outcomes, found.logprobs, lines[0].tokens if lines else [])


@dataclass(frozen=True)
class _ReadingPlan:
    """What is read behind the context, and which of its predictions count.

    scored: reference, then choices; per continuation its (node, the token it should predict). last: nodes
    from here on predict nothing but a draft.
    """

    tree: Tree
    scored: list[list[tuple[int, int]]]
    last: int

    @classmethod
    def of(cls, request: AnswerRequest, full: AnswerSet | None, whole: bool) -> _ReadingPlan:
        """whole: read the last token of the reference, too, which predicts nothing but has attention."""
        tree = Tree.of(request.prompt.question)
        scored: list[list[tuple[int, int]]] = []
        for part in (request.prompt.reference, *request.prompt.choices):
            nodes = tree.add(part.ids if whole and not scored else part.ids[:-1])
            scored.append(list(zip(nodes, part.ids, strict=False)))
        last = len(tree)
        if request.draft and full is not None and full.written:
            shared = _count_shared(full.written, request.prompt.reference.ids)
            tree.add(full.written[: shared + DRAFT][:-1])
        return cls(tree, scored, last)


def _count_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


@dataclass
class _Predictions:
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
    def join(cls, parts: list[_Predictions]) -> _Predictions:
        """Rows that were read in pieces."""
        divergences = [part.divergence for part in parts if part.divergence is not None]
        return cls(
            tokens=[torch.cat(pieces) for pieces in zip(*(part.tokens for part in parts), strict=True)],
            divergence=torch.cat(divergences) if divergences else None,
            logprobs=parts[0].logprobs,
            predicted=torch.cat([part.predicted for part in parts]),
        )


def _read(
    request: AnswerRequest,
    cache: Cache,
    plan: _ReadingPlan,
    full: AnswerSet | None,
    observer: Observer | None,
) -> _Predictions:
    """Read the tree in blocks, keeping only what the metrics need."""
    lm, tree, context = request.lm, plan.tree, len(request.prompt.context)
    ids = torch.tensor(tree.ids, device=lm.device)
    positions = torch.tensor(tree.depth, device=lm.device) + context
    pairs = [pair for part in plan.scored for pair in part]
    tokens = torch.empty(cache.rows, len(pairs), device=lm.device)
    reference = len(plan.scored[0])
    vocabulary = lm.model.config.get_text_config(decoder=True).vocab_size
    block = max(1, LOGITS_LIMIT // (4 * cache.rows * vocabulary))
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
                kl.append(_diverge(full.logprobs[span], logprobs))
        begin = end
    return _Predictions(
        tokens=list(tokens.split([len(part) for part in plan.scored], 1)),
        divergence=torch.cat(kl, 1) if kl else None,
        logprobs=torch.cat(row0) if row0 else None,
        predicted=torch.cat(predicted, 1),
    )


def _diverge(full: Tensor, logprobs: Tensor) -> Tensor:
    """KL from the full cache: (token, vocabulary), (row, token or more, vocabulary) -> (row, token)."""
    return (full - logprobs[:, : full.shape[0]]).mul_(full.exp()).sum(-1)


def _make_outcomes(prompt: Prompt, found: _Predictions, answers: list[Answer]) -> list[Outcome]:
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


def _choose(plan: _ReadingPlan, prompt: Prompt, predicted: list[int]) -> Answer:
    """An answer that is a choice: would greedy decoding write it? Its likelihoods come later."""
    parts = zip(plan.scored[1:], prompt.choices, strict=True)
    greedy = (
        all(predicted[node - plan.tree.root] == token for node, token in pairs[-choice.scored :])
        for pairs, choice in parts
    )
    return Answer(greedy=tuple(greedy))
