"""Expected Attention with stored statistics: what is measured on traces is what the projections give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.contract.calibration import load_calibration
from kvbench.contract.need import Need
from kvbench.contract.registry import POLICIES
from kvbench.errors import BadInput
from kvbench.learn.collect import TraceConfig, collect
from kvbench.policies.expected_attention.policy import MOMENTS
from kvbench.store.results import read_rows
from tests.kvp.conftest import folder, story  # noqa: F401
from tests.tiny import HEAD_DIM, LAYERS, QUERY_HEADS, tiny_model

pytestmark = pytest.mark.usefixtures("story")
SINKS = 4


def queries(ids: list[int]) -> list[torch.Tensor]:
    """Of every layer before RoPE, sinks left out: (query_head, token, dim)."""
    model, found = tiny_model("llama", "sdpa"), []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: found.append(out[0]))
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    return [one.unflatten(-1, (QUERY_HEADS, HEAD_DIM)).transpose(0, 1)[:, SINKS:] for one in found]


def test_from_traces_to_rows(folder: str, tmp_path: Path) -> None:  # noqa: F811
    settings: dict[str, Any] = {"tasks": ("story",), "samples": 4, "model": folder, "store": "float32"}
    traces = collect(TraceConfig(out=str(tmp_path / "traces"), device="cpu", **settings), progress=False)
    out = tmp_path / "stats.safetensors"
    asked = [
        "train",
        "--policy",
        "expected_attention",
        "--traces",
        str(tmp_path / "traces"),
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(cli.app, [*asked, "--validation", "0.25"])
    assert done.exit_code == 0, (done.output, done.exception)
    made = load_calibration(out, "expected_attention", {MOMENTS})
    read = [queries(list(info.ids)) for info in traces.infos[:3]]
    for layer in range(LAYERS):
        rows = torch.cat([one[layer] for one in read], 1)
        mean = rows.mean(1, keepdim=True)
        covariance = (rows - mean).transpose(-1, -2) @ (rows - mean) / rows.shape[1]
        found = made.tensors[MOMENTS][layer]
        assert torch.allclose(found[:, 0], mean[:, 0], atol=1e-4)
        assert torch.allclose(found[:, 1:], covariance, atol=1e-3)
    assert f"--policy expected_attention:stats={out}" in done.stdout
    assert f"validation cost {made.card['validation_cost']:.3f}" in done.stdout
    run = ["run", "--policy", f"expected_attention:stats={out},expected_attention", "--model", folder]
    more = [
        "--task",
        "story",
        "--budgets",
        "16",
        "--limit",
        "2",
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    ]
    again = CliRunner().invoke(cli.app, [*run, *more])
    assert again.exit_code == 0, again.output
    rows = read_rows(tmp_path / "run")
    stored = rows[rows["spec"].str.contains("stats")]
    assert set(stored["status"]) == {"ok"}
    own = rows[rows["spec"] == "expected_attention"]
    assert not stored["metric:nll"].reset_index(drop=True).equals(own["metric:nll"].reset_index(drop=True))


def test_what_it_reads_and_fits() -> None:
    own, stored = (POLICIES.parse(spec) for spec in ("expected_attention", "expected_attention:stats=ruler"))
    assert Need.QUERY_MOMENTS in own.needs
    assert (own.trained_for, own.identity, own.seen_text, own.card) == (None, "", None, {})
    assert Need.QUERY_MOMENTS not in stored.needs
    assert stored.trained_for is not None
    assert stored.seen_text is not None
    assert stored.card["policy"] == "expected_attention"
    with pytest.raises(BadInput, match="nowhere"):
        _ = POLICIES.parse("expected_attention:stats=nowhere").trained_for
