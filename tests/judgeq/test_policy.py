"""The score against nested loops, its relation to TOVA, and files of soft tokens."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.contract.cell import Ranker
from kvbench.contract.observation import Observation, ProbeLayer
from kvbench.contract.pins import Pins
from kvbench.contract.registry import POLICIES
from kvbench.engine.bind import bind_policies
from kvbench.engine.cache import Cache
from kvbench.engine.observe import Moment
from kvbench.engine.passes import read_and_rank
from kvbench.errors import BadInput
from kvbench.policies.judgeq.policy import JudgeQ
from kvbench.policies.tova import TOVA
from tests.judgeq import make
from tests.laws.lab import loaded, words
from tests.scene import DIM, KV_HEADS, QUERY_HEADS, scene
from tests.tiny import ARCHS, LAYERS

N = 40
GROUP = QUERY_HEADS // KV_HEADS


def seen_with_probe(slots: int, count: int) -> Observation:
    draw = torch.Generator().manual_seed(3)
    probed = ProbeLayer(
        torch.randn(1, QUERY_HEADS, count, DIM, generator=draw),
        torch.randn(1, KV_HEADS, count, DIM, generator=draw),
    )
    return dataclasses.replace(scene(slots, new=5), _probe=probed)


def by_hand(seen: Observation, head: int) -> list[float]:
    """Mean attention of the soft tokens of one query head, in loops."""
    assert seen._probe is not None
    keys = [*seen.keys[0, head // GROUP].tolist(), *seen._probe.keys[0, head // GROUP].tolist()]
    queries = seen._probe.queries[0, head].tolist()
    total = [0.0] * seen.slots
    for t, query in enumerate(queries):
        visible = keys[: seen.slots + t + 1]
        weights = [
            math.exp(seen.scaling * math.fsum(a * b for a, b in zip(query, k, strict=True))) for k in visible
        ]
        for slot in range(seen.slots):
            total[slot] += weights[slot] / math.fsum(weights) / len(queries)
    return total


def pooled(values: list[float], kernel: int, how: str) -> list[float]:
    half, out = kernel // 2, []
    for i in range(len(values)):
        near = [values[j] for j in range(i - half, i + half + 1) if 0 <= j < len(values)]
        out.append(max(near) if how == "max" else math.fsum(near) / kernel)
    return out


@pytest.mark.parametrize("pooling", ["none", "max", "avg"])
@pytest.mark.parametrize("group", ["mean", "max", "layer"])
def test_score_by_hand(pooling: Any, group: Any) -> None:
    seen = seen_with_probe(14, 3)
    policy = JudgeQ(group=group, pooling=pooling, kernel=3)
    score = policy.score(seen.limited_to(policy.needs))
    heads = [by_hand(seen, head) for head in range(QUERY_HEADS)]
    if pooling != "none":
        heads = [pooled(head, 3, pooling) for head in heads]
    for kv in range(KV_HEADS):
        part = heads if group == "layer" else heads[kv * GROUP : (kv + 1) * GROUP]
        join = max if group == "max" else lambda column: math.fsum(column) / len(column)
        assert score[0, kv].tolist() == pytest.approx([join(column) for column in zip(*part, strict=True)])


@torch.inference_mode()
def scores(arch: str, policy: Any, ids: tuple[int, ...]) -> list[torch.Tensor]:
    """A policy's scores in every full layer after reading these ids."""
    found: list[torch.Tensor] = []

    @dataclasses.dataclass(frozen=True)
    class Spy(type(policy)):  # type: ignore[misc]
        def score(self, seen: Observation) -> torch.Tensor:
            found.append(super().score(seen))
            return found[-1]

    lm = loaded(arch)
    ranker = Ranker(Spy(**dataclasses.asdict(policy)), Pins())
    cache, moment = Cache.empty(LAYERS, len(ids) + 1), Moment(len(ids), len(ids), 0)
    bound = bind_policies(lm, [ranker.policy])
    rankings, _ = read_and_rank(bound, cache, torch.tensor(ids), [[ranker]], moment)
    assert not rankings.failures
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_the_last_token_as_soft_token_is_tova(arch: str, tmp_path: Path) -> None:
    """n = 1, the last token's own embedding, all heads of a layer joined.

    The soft token is a second last token, one position later: its scores are those of TOVA on the
    context with its last token repeated, without the repetition's own column. TOVA on the context
    itself looks from one position earlier and does not see that column; so scores differ, little in rank.
    """
    ids = words(N, 3)
    row = loaded(arch).model.get_input_embeddings().weight[ids[-1]][None].clone()
    layers = len(loaded(arch).geometry.full_layers)
    weights = make.tokens_file(tmp_path / "w.safetensors", row, "5e", layers)
    mine = scores(arch, JudgeQ(weights=weights, group="layer"), ids)
    repeated = scores(arch, TOVA(), (*ids, ids[-1]))
    assert len(mine) == len(repeated) == layers
    for one, tova in zip(mine, repeated, strict=True):
        assert torch.allclose(one, tova[..., :N], atol=1e-6)
    original = scores(arch, TOVA(), ids)
    assert not torch.allclose(mine[0], original[0], atol=1e-4)  # the documented difference is there


def test_bound_once_and_still_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound soft tokens lie ready in the model's dtype; no file is read for them, and no row can tell."""
    policy = JudgeQ(weights=make.tokens_file(tmp_path / "w.safetensors", make.drawn(), "5e"))
    half = dataclasses.replace(loaded("llama").description, dtype=torch.bfloat16)
    bound = policy.bind(half)
    assert bound == policy
    assert hash(bound) == hash(policy)
    assert dataclasses.asdict(bound) == dataclasses.asdict(policy)
    assert (bound.identity, bound.pins) == (policy.identity, policy.pins)
    monkeypatch.setattr("kvbench.policies.judgeq.policy.load", lambda path: pytest.fail("a file was read"))
    assert torch.equal(bound.probe, make.drawn().bfloat16())
    assert bound.probe.data_ptr() == bound.probe.data_ptr()  # not made again for every look
    assert torch.equal(bound.score(seen_with_probe(14, 3)), policy.score(seen_with_probe(14, 3)))


def test_weights_are_named_or_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="kvbench train --policy judgeq"):
        JudgeQ(weights="nothing").probe  # noqa: B018
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"no")
    with pytest.raises(BadInput, match="train again"):
        JudgeQ(weights=str(path)).probe  # noqa: B018


def test_identity_is_of_the_numbers_and_the_model(tmp_path: Path) -> None:
    def identity(name: str, seed: int, sha256: str) -> str:
        return JudgeQ(weights=make.tokens_file(tmp_path / name, make.drawn(seed=seed), sha256)).identity

    first = identity("a", 0, "5e")
    assert first == identity("b", 0, "5e")
    assert len({first, identity("c", 1, "5e"), identity("d", 0, "6f")}) == 3
    assert first != identity("a", 1, "5e")  # a file that has changed is read again


def test_shipped_tokens() -> None:
    for name in ("ruler", "dialogue"):
        policy: JudgeQ = POLICIES.parse(f"judgeq:weights={name}")
        assert policy.probe.shape == (policy.card["recipe"]["tokens"], 576)
        assert policy.trained_for.sha256 == policy.card["model_sha256"]
        assert policy.card["validation_cost"] < policy.card["untrained_cost"]
        assert policy.pins == Pins()
    assert POLICIES.parse("judgeq:window=8").pins == Pins(last=8)


@pytest.mark.parametrize(
    "spec",
    ["judgeq:kernel=4", "judgeq:kernel=0", "judgeq:window=-1", "judgeq:group=sum", "judgeq:pooling=median"],
)
def test_bad_parameters(spec: str) -> None:
    with pytest.raises(BadInput, match="judgeq"):
        POLICIES.parse(spec)
