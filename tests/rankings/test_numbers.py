"""Scores of the rankings against numbers worked out by hand, and against loops from their formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.contract.layer_parts import LayerParts
from kvbench.contract.observation import Observation
from kvbench.contract.output_projection import OutputProjection
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES
from kvbench.contract.rotary import Rotary
from kvbench.contract.shared_work import SharedWork
from kvbench.contract.two_stages import entry_sizes
from kvbench.engine.order import keep, rank
from kvbench.errors import BadInput, KvbenchError
from kvbench.policies.leverage import gaussian
from tests.scene import DIM, KV_HEADS, QUERY_HEADS, scene

GROUP = QUERY_HEADS // KV_HEADS
CASES = {"one chunk": {}, "chunked": {"new": 20}}


def score(spec: str, seen: Observation) -> Tensor:
    policy: Policy = POLICIES.parse(spec)
    return policy.score(seen.limited_to(policy.needs))


def turned(angle: float, x: Tensor) -> Tensor:
    """A plane turned by an angle."""
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s], [s, c]]) @ x


def plane(start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Tables of one pair of dimensions that turns by 1 a position."""
    angles = torch.arange(start, stop).float()[:, None].expand(-1, 2)
    return angles.cos(), angles.sin()


def of(keys: list, values: list, queries: list | None = None) -> Observation:
    """One KV head, one query head, dimension 2, theta 1."""
    k, v = (torch.tensor(x, dtype=torch.float32)[None, None] for x in (keys, values))
    n = k.shape[2]
    q = torch.zeros(1, 1, n, 2) if queries is None else torch.tensor(queries)[None, None].float()
    parts = LayerParts(Rotary(2, plane), OutputProjection(torch.eye(2), 1))
    return Observation(
        layer=0, n_layers=1, keys=k, values=v, positions=torch.arange(n)[None, None], new=n, seen=n,
        scaling=2**-0.5, _draw=0, _queries=q, _parts=parts, _question=2,
    )  # fmt: skip


def expected_of(eps: float) -> Tensor:
    """mu (1, 0), Sigma ((.5, .1), (.1, .2)), two positions ahead of three tokens."""
    root = torch.linalg.cholesky(torch.tensor([[0.5, 0.1], [0.1, 0.2]]))
    seen = of([(1, 0), (0, 1), (1, 1)], [(1, 0), (0, 5), (2, 0)])
    deviation = math.sqrt(1.5) * torch.tensor([[1.0, -1, 0], [1, 1, -2]]) * torch.tensor([[1.0], [3**-0.5]])
    plain = torch.tensor([[1.0], [0.0]]) + root @ deviation  # (dim, token): that mean and covariance
    queries = torch.stack([turned(float(i), plain[:, i]) for i in range(3)])
    seen = replace(seen, _queries=queries[None, None], _shared=SharedWork())
    return score(f"expected_attention:future=2,sinks=0,eps={eps}", seen)[0, 0]


def test_expected_attention_by_hand() -> None:
    assert expected_of(0.0).tolist() == pytest.approx([0.30085, 2.12435, 0.54857], abs=2e-5)
    assert expected_of(0.02).tolist() == pytest.approx([0.32085, 2.22435, 0.58857], abs=2e-5)


def test_leverage_by_hand() -> None:
    """Without a sketch, but for the 0.01 on the diagonal, which its numbers leave out."""
    keys = [(1, 0), (0, 1), (1, 1), (3, 0)]
    seen = of([turned(i, torch.tensor(k).float()).tolist() for i, k in enumerate(keys)], [(0, 0)] * 4)
    found = score("leverage:sketch=0", seen)[0, 0].tolist()
    assert found == pytest.approx([0.65, 0.35, 0.35, 0.65], abs=0.015)


def test_critical_kv_by_hand() -> None:
    """Of 3 kept, one by score, two by score times norm."""
    first = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05])
    second = (first + 1e-4) * torch.tensor([1.0, 2, 1, 5, 9])
    found = entry_sizes(first[None, None], second[None, None], 0.5)[0, 0]
    assert {i for i, size in enumerate(found.tolist()) if size <= 3} == {0, 1, 3}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.8, 1.0])
def test_two_stages_at_every_size(share: float) -> None:
    """Every kept set is the one that the two stages choose, ties included."""
    draw = torch.Generator().manual_seed(3)
    first, second = (torch.randint(0, 30, (2, 3, 41), generator=draw).float() for _ in range(2))
    found = entry_sizes(first, second, share)
    for row in range(2):
        for head in range(3):
            one, two = first[row, head].tolist(), second[row, head].tolist()
            for size in range(1, 42):
                leading = max(1 if share else 0, int(size * share))
                kept = sorted(range(41), key=lambda i: (-one[i], -i))[:leading]
                rest = sorted(set(range(41)) - set(kept), key=lambda i: (-two[i], -i))
                kept += rest[: size - leading]
                assert set(kept) == {i for i in range(41) if found[row, head, i] <= size}


@pytest.mark.parametrize("spec", ["cap_kv:sinks=0,tau=0,eps=0,future=1", "jacap"])
def test_leverage_of_values_by_hand(spec: str) -> None:
    """Weights 1, values (1, 0) and (0, 2), so M = diag(2, 5) and the scores are .5 and .8."""
    if spec == "jacap":  # a = (.5, .5), so w = .0625 k L k / 2, which is 1 for k = (4, 0), L = diag(2, 2)
        seen = of([(4, 0), (0, 4)], [(1, 0), (0, 2)], [(2, 0), (0, 2)])
        seen = replace(seen, _queries=torch.tensor([(2.0, 0), (0, 2.0)])[None, None])
    else:
        seen = of([(1, 0), (0, 1)], [(1, 0), (0, 2)], [(1.0, 1), (1, 1)])
    assert score(spec, seen)[0, 0].tolist() == pytest.approx([0.5, 0.8], abs=1e-5)


def test_finch_by_hand() -> None:
    """Rows times 4 and 5, then their mean; the question leads."""
    seen = scene(6)
    rows = torch.zeros(1, QUERY_HEADS, 2, 6)
    rows[:, :, 0, 1], rows[:, :, 1, 1] = 0.1, 0.2
    seen._shared["window", 2] = rows
    seen._question = 2
    found = score("finch", seen)[0, 0].tolist()
    assert found[:4] == pytest.approx([0, 0.7, 0, 0])
    assert min(found[4:]) > 0.7


def test_finch_without_its_question() -> None:
    seen = scene(6)
    seen._question = 0
    with pytest.raises(KvbenchError, match="--question seen"):
        score("finch", seen)


def heads(seen: Observation) -> list[tuple[int, int]]:
    return [(row, head) for row in range(seen.keys.shape[0]) for head in range(KV_HEADS)]


def unrotated(seen: Observation, x: Tensor, position: int) -> Tensor:
    """One vector of the scene before its rotation: planes (i, i + rotated / 2) turned back one by one."""
    assert seen._parts is not None
    assert seen._parts.rotary is not None
    tables, found = seen._parts.rotary.read(position, position + 1, x.device), x.clone()
    half = tables.rotated // 2
    for i in range(half):
        c, s = tables.cos[0, i], tables.sin[0, i]
        found[i], found[i + half] = c * x[i] + s * x[i + half], c * x[i + half] - s * x[i]
    return found


def ahead_matrix(seen: Observation, count: int) -> Tensor:
    """The mean of the next rotations as a matrix."""
    assert seen._parts is not None
    assert seen._parts.rotary is not None
    tables = seen._parts.rotary.read(seen.seen, seen.seen + count, seen.keys.device)
    total, half = torch.zeros(DIM, DIM), tables.rotated // 2
    for cos, sin in zip(tables.cos, tables.sin, strict=True):
        turn = torch.eye(DIM)
        for i in range(half):
            turn[i, i] = turn[i + half, i + half] = cos[i]
            turn[i, i + half], turn[i + half, i] = -sin[i], sin[i]
        total += turn
    return total / count


def query_rows(seen: Observation, row: int, head: int, skip: int) -> Tensor:
    """Queries of the chunk before rotation, those of the first positions left out: (t, dim)."""
    start = seen.seen - seen.new
    return torch.stack([
        unrotated(seen, seen._queries[row, head, t], start + t) for t in range(seen.new) if start + t >= skip
    ])  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_expected_attention_by_loops(case: str) -> None:
    seen = scene(30, batch=2, **CASES[case])
    found, ahead = score("expected_attention:future=9,eps=0.01", seen), ahead_matrix(seen, 9)
    for row, head in heads(seen):
        scores = torch.zeros(30)
        rest = [i for i in range(30) if seen.positions[row, head, i] >= 4]
        for member in range(head * GROUP, (head + 1) * GROUP):
            q = query_rows(seen, row, member, 4)
            mean, centred = ahead @ q.mean(0), (q - q.mean(0)) @ ahead.T
            logits = []
            for i in rest:
                k = seen.keys[row, head, i]
                spread = (centred @ k).square().mean()
                logits.append(mean @ k / DIM**0.5 + spread / (2 * DIM))
            scores[rest] += torch.stack(logits).softmax(0) / GROUP
        for i in rest:
            wanted = (scores[i] + 0.01) * seen.values[row, head, i].norm()
            assert found[row, head, i] == pytest.approx(float(wanted), rel=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_cap_kv_by_loops(case: str) -> None:
    seen = scene(30, batch=2, **CASES[case])
    found, ahead = score("cap_kv:future=9", seen), ahead_matrix(seen, 9)
    for row, head in heads(seen):
        total = torch.zeros(30, dtype=torch.float64)
        rest = [i for i in range(30) if seen.positions[row, head, i] >= 4]
        for member in range(head * GROUP, (head + 1) * GROUP):
            mean = ahead @ query_rows(seen, row, member, 4).mean(0)
            near = torch.stack([torch.cosine_similarity(mean, seen.keys[row, head, i], 0) for i in rest])
            capacity = torch.eye(DIM, dtype=torch.float64)
            for weight, i in zip((5 * (near - near.max())).exp(), rest, strict=True):
                v = seen.values[row, head, i].double()
                capacity += (weight + 1e-6) * torch.outer(v, v)
            for weight, i in zip((5 * (near - near.max())).exp(), rest, strict=True):
                v = seen.values[row, head, i].double()
                total[i] += weight * v @ torch.linalg.solve(capacity, v) / GROUP
        assert torch.allclose(found[row, head, rest].double(), total[rest], rtol=1e-3)


@pytest.mark.parametrize("sketch", [0, 5])
def test_leverage_by_loops(sketch: int) -> None:
    seen = scene(30, batch=2, new=20)
    found, phi = score(f"leverage:sketch={sketch}", seen), gaussian(seen.layer, KV_HEADS, DIM, sketch or 1)
    for row, head in heads(seen):
        keys = [
            unrotated(seen, seen.keys[row, head, i], int(seen.positions[row, head, i])) for i in range(30)
        ]
        x = torch.stack(keys).double() - torch.stack(keys).double().mean(0)
        x = x @ phi[head] if sketch else x
        inverse = torch.linalg.inv(x.T @ x + 0.01 * torch.eye(x.shape[1]))
        assert torch.allclose(found[row, head].double(), (x @ inverse * x).sum(-1), atol=1e-4)


@pytest.mark.parametrize("output", [True, False])
def test_jacap_by_loops(output: bool) -> None:
    """With W_O itself: M has the size of the model's output."""
    seen = scene(30, batch=2, new=20)
    assert seen._parts is not None
    assert seen._parts.output is not None
    found, weight = score(f"jacap:output={output}", seen), seen._parts.output.weight.double()
    for row, head in heads(seen):
        total = torch.zeros(30, dtype=torch.float64)
        for member in range(head * GROUP, (head + 1) * GROUP):
            q, k = seen._queries[row, member].double(), seen.keys[row, head].double()
            attention = (k @ q.mean(0) / DIM**0.5).softmax(0)
            u = seen.values[row, head].double()
            u = u @ weight[:, member * DIM : (member + 1) * DIM].T if output else u
            matrix, weights = torch.eye(u.shape[1], dtype=torch.float64), []
            for a, one, became in zip(attention, k, u, strict=True):
                kappa = (q @ one).square().mean()
                weights.append((a * (1 - a)) ** 2 * kappa / DIM)
                matrix += weights[-1] * torch.outer(became, became)
            total += torch.stack(weights) * (u @ torch.linalg.inv(matrix) * u).sum(-1) / GROUP
        assert torch.allclose(found[row, head].double(), total, rtol=1e-3, atol=1e-7)


def test_rest_kv_by_loops() -> None:
    seen = scene(30, batch=2)
    assert seen._parts is not None
    assert seen._parts.output is not None
    found, weight = score("rest_kv:window=6,kernel=3,tau=2,alpha=0.4", seen), seen._parts.output.weight
    rows = seen.window_attention(6)
    for row, head in heads(seen):
        total = torch.zeros(24)
        for member in range(head * GROUP, (head + 1) * GROUP):
            a = rows[row, member, 0, :24]
            for t in range(1, 6):
                a = 0.4 * rows[row, member, t, :24] + 0.6 * a
            output = sum(a[i] * seen.values[row, head, i] for i in range(24))
            w = weight[:, member * DIM : (member + 1) * DIM]
            moved = [
                a[i] / (1 - a[i]) * (w @ (output - seen.values[row, head, i])).norm() ** 2 for i in range(24)
            ]
            padded = [moved[0], *moved, moved[-1]]
            total += torch.stack([sum(padded[i : i + 3]) / 3 for i in range(24)]) / GROUP
        assert torch.allclose(found[row, head, :24], total, rtol=1e-3)
        assert found[row, head, 24:].min() > found[row, head, :24].max()


@pytest.mark.parametrize("case", CASES)
def test_compactor_by_loops(case: str) -> None:
    seen = scene(40, batch=2, **CASES[case])
    found = score("compactor:first=3,last=2,tile=8,sketch=0,blend=0.5", seen)
    kept, start = 40 - seen.new, max(3 - (seen.seen - seen.new), 0)
    for row in range(2):
        parts = []
        for head in range(KV_HEADS):
            rest = [i for i in range(40) if 3 <= seen.positions[row, head, i] < seen.seen - 2]
            keys = {
                i: unrotated(seen, seen.keys[row, head, i], int(seen.positions[row, head, i])) for i in rest
            }
            x = torch.stack(list(keys.values())).double()
            x = x - x.mean(0)
            lever = (x @ torch.linalg.inv(x.T @ x + 0.01 * torch.eye(DIM)) * x).sum(-1)
            attended = torch.zeros(40)
            for begin in range(start, seen.new - 2, 8):
                tile = range(begin, min(begin + 8, seen.new - 2))
                columns = [i for i in rest if i - kept in tile or (begin == start and i < kept)]
                for member in range(head * GROUP, (head + 1) * GROUP):
                    for t in tile:
                        logits = seen.keys[row, head, columns] @ seen._queries[row, member, t]
                        attended[columns] += logits.softmax(0) / GROUP
            attended = attended * seen.values[row, head].norm(dim=-1)
            pooled = [sum(attended[j] for j in (i - 1, i, i + 1) if j in rest) / 3 for i in rest]
            parts.append((rest, lever, torch.stack(pooled)))
        levers, pools = (torch.cat([part[j] for part in parts]) for j in (1, 2))
        for head, (rest, lever, pooled) in enumerate(parts):
            wanted = 0.5 * (lever - levers.mean()) / levers.std() + (pooled - pools.mean()) / pools.std()
            assert torch.allclose(found[row, head, rest].double(), wanted, atol=1e-3)


def test_critical_kv_by_loops() -> None:
    """Kept sets of every size, over a base with pins."""
    seen = scene(30, batch=2)
    policy = POLICIES.parse("critical_kv:base=(snapkv:window=4,kernel=3)")
    order = rank(policy.score(seen.limited_to(policy.needs)), seen.positions, policy.pins, seen.seen)
    base = policy.inner.score(seen.limited_to(policy.inner.needs))
    assert seen._parts is not None
    assert seen._parts.output is not None
    norms = seen.by_group(seen._parts.output.sums(seen.values)).mean(2)
    for row, head in heads(seen):
        one = base[row, head].clone()
        one[26:] = one.max() + 1
        two = (one + 1e-4) * norms[row, head]
        for size in range(8, 31):  # the window leads
            first = set(one.topk(size // 2).indices.tolist())
            rest = [i for i in two.argsort(descending=True).tolist() if i not in first]
            kept = first | set(rest[: size - len(first)])
            if set(range(26, 30)) <= kept:
                assert set(keep(order, size)[row, head].tolist()) == kept


@pytest.mark.parametrize(
    "spec",
    [
        "expected_attention:future=0", "expected_attention:sinks=-1", "expected_attention:eps=-1",
        "cap_kv:tau=-1", "cap_kv:future=0", "critical_kv:share=1.5", "critical_kv:eps=-1",
        "leverage:sketch=-1", "compactor:tile=0",
        "compactor:blend=-1", "jacap:tau=0", "rest_kv:kernel=4", "rest_kv:alpha=0", "rest_kv:window=0",
    ],
)  # fmt: skip
def test_bad_parameters_name_the_policy(spec: str) -> None:
    with pytest.raises(BadInput, match=spec.split(":")[0]):
        POLICIES.parse(spec)
