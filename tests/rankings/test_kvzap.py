"""KVzap: its fits against least squares, its targets, and the way from traces to rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.contract.calibration import load_calibration
from kvbench.contract.registry import POLICIES
from kvbench.learn.collect import TraceConfig, collect
from kvbench.learn.ranked import open_recorder
from kvbench.learn.reread import reread
from kvbench.model.context_text import context_text
from kvbench.model.prompt import Continuation, Prompt
from kvbench.policies.kvzap.command import TEACHER
from kvbench.policies.kvzap.fit import MLP, Linear
from kvbench.policies.kvzap.policy import PARTS, predict
from kvbench.policies.kvzap.recipe import KVzapRecipe
from kvbench.store.results import read_rows
from tests.kvp.conftest import folder, story  # noqa: F401
from tests.kvp.test_trace import received
from tests.rankings.test_second_pass import rankings
from tests.tiny import KV_HEADS, LAYERS

ROWS, WIDTH, HEADS = 60, 7, 2


def drawn(layers: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (layer, row, d_model), and targets (layer, row, head) that are not quite linear."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(layers, ROWS, WIDTH, generator=draw) + 2
    y = x @ torch.randn(layers, WIDTH, HEADS, generator=draw) + 5 + 0.3 * x[..., :HEADS].square()
    return x, y


@pytest.mark.parametrize("ridge", [1e-6, 3.0, 1e9])
def test_the_linear_fit_is_ridge_regression(ridge: float) -> None:
    x, y = drawn()
    fit = Linear(KVzapRecipe(ridge=ridge))
    for part in (slice(0, 25), slice(25, ROWS)):
        fit.add(list(x[:, part]), y[:, part].transpose(1, 2))
    inner, inner_bias, outer, bias = fit.finish(print)
    assert (inner.shape, inner_bias.shape) == ((3, 0, WIDTH), (3, 0))
    for layer in range(3):
        given, wanted = x[layer].double(), y[layer].double()
        centred = given - given.mean(0)
        stacked = torch.cat([centred, ridge**0.5 * torch.eye(WIDTH).double()])
        right = torch.cat([wanted - wanted.mean(0), torch.zeros(WIDTH, HEADS).double()])
        weights = torch.linalg.lstsq(stacked, right).solution
        expected = centred @ weights + wanted.mean(0)
        found = predict((inner[layer], inner_bias[layer], outer[layer], bias[layer]), x[layer])
        assert torch.allclose(found.double(), expected, atol=1e-3)


def test_the_mlp_learns_what_is_not_linear() -> None:
    x, y = drawn()
    errors = []
    for fit in (Linear(KVzapRecipe()), MLP(KVzapRecipe(hidden=32, epochs=400, batch=20, lr=2e-2))):
        fit.add(list(x), y.transpose(1, 2))
        parts = fit.finish(lambda text: None)
        found = torch.stack([predict(tuple(part[i] for part in parts), x[i]) for i in range(3)])
        errors.append((found - y).square().mean().item())
    assert errors[1] < errors[0] / 2 < y.var().item() / 2


@pytest.mark.usefixtures("story")
def test_from_traces_to_rows(folder: str, tmp_path: Path) -> None:  # noqa: F811
    settings: dict[str, Any] = {"tasks": ("story",), "samples": 4, "model": folder, "store": "float32"}
    traces = collect(TraceConfig(out=str(tmp_path / "traces"), device="cpu", **settings), progress=False)
    lm, ids = open_recorder(traces).load(), tuple(traces.infos[0].ids[: traces.infos[0].context])
    found = reread(lm, ids, TEACHER)
    for layer, hidden in enumerate(received(list(ids))):
        assert torch.allclose(found.hidden[layer], hidden, atol=1e-5)
    text = context_text(lm.tokenizer, Prompt(ids, (), (), Continuation((5,), 1)))
    one = next(iter(rankings("llama", [TEACHER], text, ids).found.values()))
    assert torch.allclose(found.score, one.score, atol=1e-6)

    out = tmp_path / "kvzap.safetensors"
    asked = ["train", "--policy", "kvzap", "--traces", str(tmp_path / "traces"), "--out", str(out)]
    done = CliRunner().invoke(cli.app, [*asked, "--validation", "0.25", "--ridge", "10"])
    assert done.exit_code == 0, (done.output, done.exception)
    made = load_calibration(out, "kvzap", PARTS)
    assert made.tensors["outer"].shape == (LAYERS, KV_HEADS, 128)
    assert 1 <= made.card["validation_cost"] < 10
    assert made.card["explained"] < 1
    command = [
        "run",
        "--policy",
        f"kvzap:weights={out},knorm",
        "--model",
        folder,
        "--task",
        "story",
        "--device",
    ]
    command += ["cpu", "--budgets", "16", "--limit", "2", "--out"]
    again = CliRunner().invoke(cli.app, [*command, str(tmp_path / "run")])
    assert again.exit_code == 0, again.output
    assert set(read_rows(tmp_path / "run")["status"]) == {"ok"}
    chunked = CliRunner().invoke(cli.app, [*command, str(tmp_path / "chunked"), "--chunk", "10"])
    assert chunked.exit_code == cli.REFUSED
    assert "cannot rank tokens of earlier chunks" in chunked.stderr
    assert not (tmp_path / "chunked" / "rows.jsonl").exists()


def test_a_wrapper_cannot_either() -> None:
    assert not POLICIES.parse("kvzap").chunked
    assert not POLICIES.parse("chunk_kv:base=kvzap").chunked
    assert POLICIES.parse("chunk_kv:base=knorm").chunked
