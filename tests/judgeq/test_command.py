"""From traces to soft tokens that rank, through the command line; and ranking on recorded traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.contract.cell import Ranker
from kvbench.contract.observation import Observation
from kvbench.engine.bind import bind_policies
from kvbench.engine.cache import Cache
from kvbench.engine.forward import read
from kvbench.engine.observe import Moment
from kvbench.engine.passes import read_and_rank
from kvbench.learn.collect import TraceConfig, _samples
from kvbench.learn.ranked import probe_trace
from kvbench.learn.record import answer_prompt
from kvbench.learn.trace import TraceSet
from kvbench.model.open import LoadedModel, open_model
from kvbench.model.prompt import Continuation, Prompt
from kvbench.policies.judgeq.policy import JudgeQ
from kvbench.store.results import read_rows
from tests.judgeq import make
from tests.kvp.make import story_added


def invoke(*command: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(part) for part in command])


@pytest.fixture(scope="module")
def weights(traces: TraceSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kvbench train` wrote after 6 steps."""
    out = tmp_path_factory.mktemp("weights") / "soft.safetensors"
    done = invoke(
        "train", "--policy", "judgeq", "--traces", traces.folder, "--steps", 6, "--tokens=3", "--warmup", 1,
        "--validation", "0.3", "--out", out,
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert "step 6/6  validation loss" in done.stdout
    assert f"kvbench run --policy judgeq:weights={out}" in done.stdout
    return out


def test_card_and_figure(weights: Path, traces: TraceSet) -> None:
    card = JudgeQ(weights=str(weights)).card
    assert card["recipe"]["steps"] == 6
    assert card["curve"]["steps"] == [0, 6]
    assert card["model_sha256"] == traces.header["model_sha256"]
    assert card["commands"][1].startswith(
        "kvbench train --policy judgeq --traces traces --steps 6 --tokens 3"
    )
    assert {file.name for file in weights.parent.iterdir()} == {"soft.safetensors", "soft.png"}
    assert weights.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    told = invoke("info", f"judgeq:weights={weights}").stdout
    assert "weights: recipe" in told
    assert "ours" in told


def test_untrained_tokens(traces: TraceSet, tmp_path: Path) -> None:
    out = tmp_path / "u.safetensors"
    done = invoke("train", "--policy", "judgeq", "--traces", traces.folder, "--steps", 0, "--out", out)
    assert done.exit_code == 0, (done.output, done.exception)
    card = JudgeQ(weights=str(out)).card
    assert card["validation_cost"] == card["untrained_cost"]


def test_it_runs_and_is_measured(weights: Path, traces: TraceSet, tmp_path: Path) -> None:
    spec, model = f"judgeq:weights={weights}", traces.header["model"]
    with story_added():
        done = invoke(
            "run", "--policy", f"{spec},knorm", "--task", "story:length=60", "--model", model, "--budgets",
            "16,30", "--limit", 2, "--device", "cpu", "--dtype", "float32", "--out", tmp_path / "run",
        )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    rows = read_rows(tmp_path / "run")
    assert set(rows["status"]) == {"ok"}
    mine = rows[rows["policy"] == "judgeq"]
    assert len(mine) == 4
    assert (mine["peak"] == mine["context_tokens"] + 3).all()
    done = invoke(
        "eviction-error", "--traces", traces.folder, "--policy", f"{spec},{spec},pooling=max,knorm,oracle",
        "--budgets", "8,16", "--split", "uniform", "--splits", 2, "--out", tmp_path / "e",
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    costs = read_rows(tmp_path / "e").groupby("spec")["metric:eviction_cost"].mean()
    assert costs["oracle"] == pytest.approx(1)
    assert len(costs) == 4
    assert (costs.drop("oracle") > 1).all()


@torch.inference_mode()
def test_a_recorded_cache_is_as_good_as_a_prefill(traces: TraceSet, lm: LoadedModel, weights: Path) -> None:
    """Soft tokens read after recorded keys and values attend as after the same tokens, read."""
    policy = JudgeQ(weights=str(weights))
    ids, n = ids_of_first(traces), traces.infos[0].context
    shown: list[Observation] = []

    class Spy(JudgeQ):
        def score(self, seen: Observation) -> torch.Tensor:
            shown.append(seen)
            return super().score(seen)

    ranker, cache = Ranker(Spy(weights=str(weights)), policy.pins), Cache.empty(lm.geometry.layers, n)
    bound = bind_policies(lm, [ranker.policy])
    read_and_rank(bound, cache, torch.tensor(ids[:n]), [[ranker]], Moment(n, n, 0))
    assert len(shown) == lm.geometry.layers
    for seen, probed in zip(shown, probe_trace(lm, traces[0], n, policy), strict=True):
        assert seen._probe is not None
        assert torch.allclose(seen._probe.queries, probed.queries, atol=1e-5)
        assert torch.allclose(seen._probe.keys, probed.keys, atol=1e-5)


def ids_of_first(traces: TraceSet) -> list[int]:
    """The ids of the first trace: its sample, made again."""
    header = traces.header
    config = TraceConfig(("story",), len(traces), "-", header["model"], header["length"])
    with story_added():
        prompt = _samples(config, open_model(header["model"], "cpu"))[0].prompt
    return [*prompt.context, *prompt.question, *prompt.reference.ids]


def test_another_model_is_refused(traces: TraceSet, tmp_path: Path) -> None:
    other = make.tokens_file(tmp_path / "o.safetensors", make.drawn(), "another")
    done = invoke(
        "eviction-error", "--traces", traces.folder, "--policy", f"judgeq:weights={other}", "--out", tmp_path
    )
    assert done.exit_code == cli.REFUSED
    assert "another fingerprint" in done.stderr


@torch.inference_mode()
def test_the_models_own_answers(lm: LoadedModel) -> None:
    prompt = Prompt(tuple(range(10, 30)), (40, 41), (), Continuation((1, 2, 3, 4, 5), 5))
    found = answer_prompt(lm, prompt)
    assert (found.context, found.question) == (prompt.context, prompt.question)
    assert 0 < len(found.reference.ids) <= 5
    ids = [*prompt.context, *prompt.question]
    for token in found.reference.ids:  # each is the greedy one, read from the start
        cache = Cache.empty(lm.geometry.layers, len(ids))
        assert int(read(lm, cache, torch.tensor(ids), 0)[0, -1].argmax()) == token
        ids.append(token)


def test_generated_responses_are_recorded(tmp_path: Path) -> None:
    found = make.recorded(tmp_path, samples=2, response="generated")
    assert found.header["response"] == "generated"
    assert all(info.tokens > info.context for info in found.infos)
    line = json.loads((found.folder / "traces.json").read_text())
    assert line["response"] == "generated"
