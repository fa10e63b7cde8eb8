"""Policies with a second pass, against the attention of stock transformers that reads everything at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.contract.cell import Cell, Ranker, Schedule
from kvbench.contract.need import Need
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES
from kvbench.contract.second_pass import ContextText, Reading, SecondPass
from kvbench.engine import attention, second_pass
from kvbench.engine.bind import bind_policies
from kvbench.engine.cache import Cache
from kvbench.engine.compress import ChunkReader, compress
from kvbench.engine.observe import Moment
from kvbench.engine.passes import read_and_rank
from kvbench.engine.ranking import Rankings
from kvbench.model.context_text import context_text
from kvbench.model.prompt import Continuation, Prompt
from tests.kvp.test_trace import computed
from tests.laws.lab import FOREVER, cells_of, loaded, prompt_of, try_out, watched
from tests.tiny import ARCHS, KV_HEADS, LAYERS, QUERY_HEADS, VOCAB, tiny_model, tiny_tokenizer

N = 40
GROUP = QUERY_HEADS // KV_HEADS
PLAIN = [arch for arch in ARCHS if arch != "sliding"]


def encode(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


def text_of(ids: tuple[int, ...], prefix: int = 0) -> ContextText:
    return ContextText(ids, prefix, encode("\n"), encode)


def rankings(arch: str, policies: list[Policy], text: ContextText | None, ids: tuple[int, ...]) -> Rankings:
    lm = loaded(arch)
    bound = bind_policies(lm, policies)
    assert not bound.failures
    rankers = [Ranker(policy, Pins()) for policy in policies]
    cache = Cache.empty(lm.geometry.layers, len(ids))
    moment = Moment(len(ids), len(ids), 0, text=text)
    with torch.inference_mode():
        found, _ = read_and_rank(bound, cache, torch.tensor(ids), [rankers], moment)
    assert cache.mark() == [[len(ids)] * lm.geometry.layers]
    return found


def score(arch: str, spec: str, text: ContextText) -> Tensor:
    """(full_layer, kv_head, slot)."""
    policy = POLICIES.parse(spec)
    return rankings(arch, [policy], text, text.ids).found[0, Ranker(policy, Pins())].score


@torch.no_grad()
def eager(arch: str, ids: tuple[int, ...]) -> Tensor:
    """Attention of stock transformers: (layer, query_head, token, token)."""
    out = tiny_model(arch, "eager")(torch.tensor([ids]), output_attentions=True)
    return torch.cat(out.attentions)


def grouped(per_query_head: Tensor) -> Tensor:
    return per_query_head.unflatten(1, (KV_HEADS, GROUP))


@pytest.mark.parametrize("arch", PLAIN)
def test_kvzip_in_one_piece(arch: str) -> None:
    ids = prompt_of(N).context
    again = encode("\n\nRepeat the previous context exactly.\n") + ids
    expected = grouped(eager(arch, ids + again)[:, :, N:, :N].amax(2)).amax(2)
    torch.testing.assert_close(score(arch, "kvzip", text_of(ids)), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("prefix", [0, 6])
def test_kvzip_in_pieces(sinks: int, prefix: int) -> None:
    """Each piece competes with the sinks and with its own repetition; the last piece is shorter."""
    ids, chunk = prompt_of(N).context, 13
    found = score("llama", f"kvzip:chunk={chunk},sinks={sinks}", text_of(ids, prefix))
    expected = torch.zeros(found.shape)
    for start in range(prefix, N, chunk):
        stop = min(N, start + chunk)
        asked = "\n\nRepeat the previous context exactly."
        said = encode(asked)
        if start > prefix:
            said = encode("\n\nRepeat the part of the previous context exactly, starting with")
            said += ids[start - 8 : start]
        again = said + encode("\n") + ids[start:stop]
        rows = eager("llama", ids + again)[:, :, N:]
        seen = torch.zeros(N + len(again), dtype=torch.bool)
        seen[: min(start, max(sinks, prefix))] = True
        seen[start:stop] = True
        seen[N:] = True
        rows = rows * seen
        rows = (rows / rows.sum(-1, keepdim=True))[..., :N]
        expected = torch.maximum(expected, grouped(rows.amax(2)).amax(2))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_kvzip_plus(arch: str) -> None:
    """Over the norm of what the repeating token's attention received, times the norm of the output."""
    ids = prompt_of(N).context
    again = encode("\n\nRepeat the previous context exactly.\n") + ids
    model = tiny_model(arch, "eager")
    inputs, values = [], []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(kwargs["hidden_states"][0, N:].norm(dim=-1)),
            with_kwargs=True,
        )
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, out: values.append(out[0, :N]))
    with torch.no_grad():
        attention = torch.cat(model(torch.tensor([ids + again]), output_attentions=True).attentions)
    expected = torch.zeros(len(inputs), KV_HEADS, N)
    for index, layer in enumerate(model.model.layers):
        weight = layer.self_attn.o_proj.weight
        dim = weight.shape[1] // QUERY_HEADS
        for head in range(QUERY_HEADS):
            mine = values[index][:, head // GROUP * dim : (head // GROUP + 1) * dim]
            norms = (mine @ weight[:, head * dim : (head + 1) * dim].T).norm(dim=-1)
            rows = attention[index, head, N:, :N] / inputs[index][:, None] * norms
            expected[index, head // GROUP] = torch.maximum(expected[index, head // GROUP], rows.amax(0))
    torch.testing.assert_close(score(arch, "kvzip:plus=true", text_of(ids)), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("over", ["max", "mean"])
@pytest.mark.parametrize("across", [True, False])
def test_kv_compose(arch: str, over: str, across: bool) -> None:
    ids = prompt_of(N).context
    rows = eager(arch, ids + ids)[:, :, N:, :N]
    expected = grouped(rows.amax(2) if over == "max" else rows.mean(2)).mean(2)
    expected = expected + expected.mean(1, keepdim=True) if across else expected
    found = score(arch, f"kv_compose:over_tokens={over},across_heads={across}", text_of(ids))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_kv_compose_with_value_norms() -> None:
    ids = prompt_of(N).context
    cache = tiny_model("llama", "eager")(torch.tensor([ids])).past_key_values
    norms = torch.cat([layer.values for layer in cache.layers]).norm(dim=-1)
    plain, weighed = (
        score("llama", f"kv_compose:across_heads=false,value_norm={on}", text_of(ids)) for on in (False, True)
    )
    torch.testing.assert_close(weighed, plain * norms, atol=1e-5, rtol=1e-4)


def test_task_press() -> None:
    ids = prompt_of(N).context
    text = replace(text_of(ids), suffix=(7, 8))
    guide = POLICIES.parse("task_press").guide
    rows = eager("llama", ids + encode("\n\n" + guide) + (7, 8))[:, :, N:, :N].sum(2)
    pooled = torch.stack([rows[..., max(0, i - 1) : i + 2].amax(-1) for i in range(N)], -1)
    model = tiny_model("llama", "eager")
    cache = model(torch.tensor([ids])).past_key_values
    scale = torch.cat([layer.keys for layer in cache.layers]).abs().amax(-1)
    expected = grouped(pooled).mean(2) * scale
    torch.testing.assert_close(score("llama", "task_press:kernel=3", text), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seen", [2, 3])
def test_sage_kv_and_laprox_by_hand(seen: int) -> None:
    from tests.rankings.test_windows import GROUP as group
    from tests.rankings.test_windows import SLOTS, causal
    from tests.scene import scene

    layer = scene(SLOTS, seed=seen)
    for head in range(KV_HEADS):
        last = torch.stack([causal(layer, head, member, 0) for member in range(group)]).mean(0)
        policy = POLICIES.parse("sage_kv")
        found = policy.score(layer.limited_to(policy.needs))[0, head].double()
        torch.testing.assert_close(found, last, atol=1e-6, rtol=1e-5)
    window, total = 5, torch.zeros(KV_HEADS, SLOTS, dtype=torch.float64)
    norms = layer.output_norms[0].double()
    for head in range(KV_HEADS):
        for member in range(group):
            rows = torch.stack([causal(layer, head, member, row) for row in range(window)])
            carried = rows.square().sum(0).sqrt() * norms[head * group + member]
            padded = torch.nn.functional.pad(carried, (1, 1))
            total[head] += (padded[:-2] + padded[1:-1] + padded[2:]) / 3 / group
    policy = POLICIES.parse(f"laprox:window={window},kernel=3")
    found = policy.score(layer.limited_to(policy.needs))[0].double()
    torch.testing.assert_close(found, total / total.sum(), atol=1e-6, rtol=1e-4)


def test_laprox_numbers() -> None:
    """A window column (.3, .4) and an output (3, 4): .5 x 5 = 2.5, before the layer's sum."""
    column, output = torch.tensor([0.3, 0.4]), torch.tensor([3.0, 4.0])
    assert (column.norm() * output.norm()).item() == pytest.approx(2.5)


# The engine


def test_equal_texts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = second_pass.read_probe

    def counting(*args: Any) -> None:
        read.append(1)
        original(*args)

    monkeypatch.setattr(second_pass, "read_probe", counting)
    ids = prompt_of(N).context
    policies = [
        POLICIES.parse(spec) for spec in ("kvzip", "kvzip:plus=true", "kvzip:sinks=0", "chunk_kv:base=kvzip")
    ]
    together = rankings("llama", policies, text_of(ids), ids)
    assert len(read) == 1
    for policy in policies:
        alone = rankings("llama", [policy], text_of(ids), ids)
        ranker = Ranker(policy, Pins())
        assert torch.equal(alone.found[0, ranker].order, together.found[0, ranker].order)
        assert (
            together.found[0, ranker].read_after
            == len(encode("\n\nRepeat the previous context exactly.\n")) + N
        )


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is read in blocks, so that memory stays linear: each token sees all of the text before it."""
    ids = prompt_of(N).context
    whole = score("llama", "kvzip:chunk=25", text_of(ids))
    monkeypatch.setattr(attention, "BLOCK", 7)
    monkeypatch.setattr(second_pass, "BLOCK", 16)
    torch.testing.assert_close(score("llama", "kvzip:chunk=25", text_of(ids)), whole, atol=1e-6, rtol=1e-5)


NOTES: list[tuple[Tensor, Tensor]] = []
READ, AGAIN = 24, (7, 8, 9, 10, 11)


class Noting(Policy):
    """Notes what it sees of a text of five tokens, asked of some positions."""

    name, source, needs = "noting", "test", frozenset({Need.SECOND_PASS, Need.RANDOM})

    def second_pass(self, text: ContextText) -> SecondPass:
        return SecondPass((Reading(AGAIN, 10, len(text.ids) - 2, sinks=3),))

    def score(self, seen: Any) -> Tensor:
        NOTES.append((seen.positions.clone(), seen.second_attention))
        return seen.uniform()


@torch.inference_mode()
def test_after_an_eviction() -> None:
    """In chunks: the text sees what was kept and the chunk, and slots are no longer positions."""
    lm, ids, policy = loaded("llama"), prompt_of(N).context, Noting()
    NOTES.clear()
    bound = bind_policies(lm, [policy])
    reader = ChunkReader(bound, torch.tensor(ids), READ, 0, None, text=text_of(ids))
    compress(bound, [Cell(policy, 16, Pins(), Schedule("chunked", READ))], reader, 0)
    gone = torch.full((LAYERS, KV_HEADS, N + len(AGAIN)), READ)
    for layer, (positions, _) in enumerate(NOTES[LAYERS:]):
        gone[layer].scatter_(1, positions[0], FOREVER)
    gone[:, :, N:] = FOREVER
    for layer, (queries, keys, _) in enumerate(computed([*ids, *AGAIN], until=gone)):
        positions, found = NOTES[LAYERS + layer]
        for head in range(QUERY_HEADS):
            mine = positions[0, head // GROUP].tolist()
            asked = [i for i in mine if i < 3 or 10 <= i < N - 2]
            best = dict.fromkeys(mine, 0.0)
            for row in range(N, N + len(AGAIN)):
                shown = [*asked, *range(N, row + 1)]
                logits = keys[head // GROUP, shown] @ queries[head, row] * lm.geometry.head_dim**-0.5
                for place, share in zip(asked, logits.softmax(0).tolist(), strict=False):
                    best[place] = max(best[place], share)
            assert found[0, head].tolist() == pytest.approx(list(best.values()), abs=1e-5)


def test_the_context_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    head, tail = (tuple(tokenizer.convert_tokens_to_ids([token])) for token in ("<|user|>", "<|end|>"))
    prompt = Prompt((*head, 9, 10), (11,), (), Continuation((12,), 1), chat=True)
    text = context_text(tokenizer, prompt)
    assert (text.ids, text.prefix) == (prompt.context, 1)
    assert text.suffix == (*tail, *tokenizer.convert_tokens_to_ids(["<|model|>"]))
    bare = context_text(tokenizer, replace(prompt, chat=False))
    assert (bare.prefix, bare.suffix) == (0, text.encode("\n"))
    assert context_text(tokenizer, replace(prompt, context=(9, 10))).prefix == 0


def test_peak_counts_what_is_read() -> None:
    """The text of the second pass stands in the cache while it is read."""
    prompt = prompt_of(N)
    cells = cells_of(("kv_compose", "knorm"), (8,))
    done = try_out(loaded("llama"), prompt, cells)
    assert (done[cells[0]].peak, done[cells[1]].peak) == (2 * N, N)


class Asking(Policy):
    name = "asking"
    source = "test"
    needs = frozenset({Need.SECOND_PASS})

    def __init__(self, asked: Any) -> None:
        object.__setattr__(self, "asked", asked)

    def second_pass(self, text: ContextText) -> SecondPass:
        if isinstance(self.asked, Exception):
            raise self.asked
        return self.asked

    def score(self, seen: Any) -> Tensor:
        return seen.by_group(seen.second_attention).mean(2)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (None, "must return a SecondPass"),
        (SecondPass(()), "with a reading or more"),
        (SecondPass((Reading((), 0, 3),)), "reads 1 token or more"),
        (SecondPass((Reading((VOCAB,), 0, 3),)), f"from 0 to {VOCAB - 1}"),
        (SecondPass((Reading((5,), 3, 3),)), "positions 3 to 3"),
        (SecondPass((Reading((5,), 0, N + 1),)), f"of {N} tokens"),
        (SecondPass((Reading((5,) * 9000, 0, 3),)), "more than the 8192 that"),
        (ValueError("no idea"), "second_pass: ValueError: no idea"),
    ],
)
def test_what_cannot_be_read_is_named(asked: Any, why: str) -> None:
    ids = prompt_of(N).context
    policy = Asking(asked)
    found = rankings("llama", [policy, POLICIES.parse("knorm")], text_of(ids), ids)
    assert "policy 'asking'" in found.failures[0, Ranker(policy, Pins())]
    assert why in found.failures[0, Ranker(policy, Pins())]
    assert len(found.found) == 1


def test_without_text_it_fails() -> None:
    ids = prompt_of(N).context
    policy = POLICIES.parse("kvzip")
    found = rankings("llama", [policy], None, ids)
    assert "is not known in this run" in found.failures[0, Ranker(policy, Pins())]


def test_answers_read_no_more_than_before() -> None:
    """The second pass leaves nothing behind: the full cache answers as without it."""
    prompt = prompt_of(N)
    with watched(loaded("llama").model) as with_it:
        first = try_out(loaded("llama"), prompt, cells_of(("kvzip",), (8,)))
    with watched(loaded("llama").model) as without:
        second = try_out(loaded("llama"), prompt, cells_of(("knorm",), (8,)))
    assert first.done.full.outcome.nll == second.done.full.outcome.nll
    assert [one.ids.shape for one in with_it[:2]] == [one.ids.shape for one in without[:2]]
