"""Q-Filters: directions worked out by hand, from traces, and kvpress' score with the same directions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.contract.calibration import Calibration, load_calibration, write_calibration
from kvbench.contract.model_description import ModelDescription
from kvbench.contract.policy import TrainedFor
from kvbench.contract.registry import POLICIES
from kvbench.errors import BadInput
from kvbench.learn.validation import boundary_cost
from kvbench.policies.q_filters.command import QFiltersRecipe, direction, rows_of
from kvbench.policies.q_filters.policy import FILTERS, QFilters
from tests.kvp import make
from tests.parity.test_kvpress import presses  # noqa: F401
from tests.scene import DIM, KV_HEADS, scene


def filters_file(path: Path, filters: torch.Tensor) -> str:
    fits = TrainedFor(*filters.shape, "5e")
    write_calibration(path, Calibration({FILTERS: filters}, fits, {"policy": "q_filters"}))
    return f"q_filters:weights={path}"


def describe(layers: int, heads: int, dim: int) -> ModelDescription:
    cpu = torch.device("cpu")
    return ModelDescription(
        name="tiny", layers=layers, evicted_layers=tuple(range(layers)), query_heads=heads, kv_heads=heads,
        head_dim=dim, width=heads * dim, devices=(cpu,) * layers, device=cpu, dtype=torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
def test_the_direction_of_most_queries(sign: int) -> None:
    queries = sign * torch.tensor([(2.0, 1.0), (1.0, 2.0), (2.0, 2.0)])
    found = direction(queries[None])[0]
    assert found.tolist() == pytest.approx([sign * math.sqrt(0.5)] * 2, abs=1e-6)
    assert (torch.tensor([1.0, 0.0]) @ found).item() == pytest.approx(sign * 0.70711, abs=1e-5)


def test_no_query_is_centred() -> None:
    """The direction is that of the queries, not that in which they differ."""
    draw = torch.Generator().manual_seed(0)
    queries = torch.tensor([5.0, 0, 0]) + torch.randn(400, 3, generator=draw) * torch.tensor([0.1, 2.0, 0.1])
    assert abs(direction(queries[None])[0][0]) > 0.99


def test_the_score_is_a_dot_product(tmp_path: Path, presses: Any) -> None:  # noqa: F811
    """kvpress holds the filters with the other sign and takes it back."""
    seen = scene(30, new=12)
    filters = torch.randn(seen.n_layers, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))
    policy = POLICIES.parse(filters_file(tmp_path / "f.safetensors", filters))
    bound = policy.bind(describe(seen.n_layers, KV_HEADS, DIM))
    found = bound.score(seen.limited_to(policy.needs))
    for head in range(KV_HEADS):
        for slot in range(30):
            dot = sum(
                a * b for a, b in zip(filters[seen.full_index, head], seen.keys[0, head, slot], strict=True)
            )
            assert found[0, head, slot].item() == pytest.approx(float(dot), abs=1e-5)
    press = presses.QFilterPress()
    press.q_filters = -filters
    module = torch.nn.Module()
    module.layer_idx = seen.full_index  # type: ignore[assignment]
    theirs = press.score(module, None, seen.keys, seen.values, None, {})
    assert found.argsort(-1).tolist() == theirs.argsort(-1).tolist()


def test_from_traces(tmp_path: Path) -> None:
    """Every query of these traces looks along one direction of its group; the file ranks by it."""
    traces = make.synthetic(tmp_path / "traces")
    out = tmp_path / "f.safetensors"
    asked = ["train", "--policy", "q_filters", "--traces", str(tmp_path / "traces"), "--out", str(out)]
    done = CliRunner().invoke(cli.app, [*asked, "--queries", "120", "--validation", "0.34"])
    assert done.exit_code == 0, done.output
    made = load_calibration(out, "q_filters", {FILTERS})
    assert made.tensors[FILTERS].shape == (make.LAYERS, make.KV_HEADS, make.DIM)
    assert made.trained_for == TrainedFor(make.LAYERS, make.KV_HEADS, make.DIM, "5e")
    for layer in range(make.LAYERS):
        wanted = torch.randn(make.KV_HEADS, make.DIM, generator=torch.Generator().manual_seed(layer))
        assert (torch.cosine_similarity(made.tensors[FILTERS][layer], wanted, dim=-1) > 0.99).all()
    assert f"validation cost {made.card['validation_cost']:.3f}" in done.stdout
    drawn = torch.randn(make.LAYERS, make.KV_HEADS, make.DIM)
    write_calibration(tmp_path / "r.safetensors", replace(made, tensors={FILTERS: drawn}))
    random = boundary_cost(traces, [4, 5], QFilters(weights=str(tmp_path / "r.safetensors")))
    assert 1 <= made.card["validation_cost"] < random


def test_every_trace_gives_as_many_queries(tmp_path: Path) -> None:
    traces = make.synthetic(tmp_path / "traces")
    rows = rows_of(traces, [0, 2, 3], 1, QFiltersRecipe(queries=31))
    assert rows.shape == (make.KV_HEADS * make.GROUP, 31, make.DIM)
    own = [traces[index].layer(1)[0][0].float() for index in (0, 2, 3)]
    counts = [int((rows[0][:, None] == queries[None]).all(-1).any(1).sum()) for queries in own]
    assert sorted(counts) == [10, 10, 11]


def test_what_is_no_file_of_filters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    fits = TrainedFor(1, 1, 2, "5e")
    for tensors, card in (
        ({"other": torch.ones(1, 1, 2)}, {"policy": "q_filters"}),
        ({FILTERS: torch.ones(1, 1, 2)}, {"policy": "judgeq"}),
        ({FILTERS: torch.full((1, 1, 2), torch.nan)}, {"policy": "q_filters"}),
    ):
        write_calibration(path, Calibration(tensors, fits, card))
        with pytest.raises(BadInput, match="not a file of q_filters"):
            _ = POLICIES.parse(f"q_filters:weights={path}").identity
    with pytest.raises(BadInput, match="train some with kvbench train --policy q_filters"):
        _ = POLICIES.parse("q_filters:weights=nowhere").identity
