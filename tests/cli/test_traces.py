"""The commands of offline learning, from a model to weights that run."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.cli.options import FAILED
from kvbench.learn.trace import TraceSet
from kvbench.model import open as models
from kvbench.policies.kvp.checkpoint import read_weights
from kvbench.policies.kvp.recipe import RECIPES, KVPRecipe
from kvbench.store.results import read_rows
from kvbench.study import runner
from tests.kvp import make
from tests.laws import toy

COMMANDS = {
    "trace": ["--task", "--samples", "--length", "--under", "--store", "--out"],
    "train": ["--policy", "--traces", "--recipe", "--out"],
    "eviction-error": ["--traces", "--policy", "--budgets", "--split", "--pins", "--baseline", "--per-head"],
}
TRAIN = ["train", "--policy", "kvp", "--traces", "nowhere", "--out", "w.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, folder: str) -> str:
    """What `kvbench trace` wrote: six stories of 60 tokens or so."""
    out = str(tmp_path_factory.mktemp("traces"))
    with make.story_added():
        done = invoke(
            "trace", "--model", folder, "--task", "story", "--samples", 6, "--length", "50-70", "--out", out
        )
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, traces: str) -> str:
    """What `kvbench train` wrote after 20 steps."""
    out = str(tmp_path_factory.mktemp("weights") / "w.safetensors")
    done = invoke(
        "train", "--policy", "kvp", "--traces", traces, "--steps", 20, "--hidden=16", "--pins", "none",
        "--last-lr", "1e-5", "--out", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert re.search(r"w\.safetensors: validation cost \d+\.\d{3} after \d+ s", done.stdout)
    assert f"kvbench run --policy kvp:weights={out}" in done.stdout
    return out


def invoke(*command: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(part) for part in command])


def refused(*command: Any) -> str:
    """The message of a command that is refused, in one line."""
    done = invoke(*command)
    assert done.exit_code == cli.REFUSED, (done.output, done.exception)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.output
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    done = invoke(command, "--help")
    assert done.exit_code == 0
    for option in COMMANDS[command]:
        assert option in done.stdout
    assert command in invoke("--help").stdout


def test_trace_says_what_it_writes_and_what_comes_next(folder: str, tmp_path: Path) -> None:
    command = ["trace", "--model", folder, "--task", "story", "--samples", 2, "--out", tmp_path / "t"]
    with make.story_added():
        done = invoke(*command)
        again = invoke(*command)
    assert done.exit_code == again.exit_code == 0, done.output
    found = TraceSet(tmp_path / "t")
    tokens = sum(info.tokens for info in found.infos)
    assert f"2 traces, {tokens} tokens, 0.00 GiB" in done.stdout
    assert "0 traces, 0 tokens" in again.stdout
    assert f"next: kvbench train --policy kvp --traces {tmp_path / 't'}" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "storm"], ["unknown task 'storm'", "needle"]),
        (["--task", "needle:size=3"], ["unknown parameter 'size'"]),
        (["--length", "many"], ["--length 'many'", "350-700"]),
        (["--under", "tova"], ["--under 'tova'", "POLICY:BUDGET"]),
        (["--under", "tofa:3"], ["unknown policy 'tofa'", "Did you mean 'tova'"]),
        (["--samples", 0], ["--samples 0"]),
        (["--store", "int8"], ["--store 'int8'", "bfloat16"]),
    ],
)
def test_trace_refuses(
    folder: str, tmp_path: Path, options: list[Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.OpenModel, "load", lambda self: pytest.fail("weights were loaded"))
    given: dict[str, Any] = {"--task": "needle", "--samples": 1, "--out": tmp_path / "t", "--model": folder}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    message = refused("trace", *[part for pair in given.items() for part in pair])
    assert all(word in message for word in words), message
    assert not (tmp_path / "t").exists()


def test_a_group_of_tasks_can_be_traced(folder: str, tmp_path: Path) -> None:
    """The group stands for its tasks; two of RULER's need data that this command lacks."""
    done = invoke(
        "trace", "--model", folder, "--task", "ruler:length=9", "--samples", 99, "--out", tmp_path / "t"
    )
    assert done.exit_code == 2
    assert "squad" in done.stderr  # one of the group's own refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--recipe", "fast"], ["unknown recipe 'fast'", "cpu, paper"]),
        (
            ["--stepps", "3"],
            ["unknown parameter 'stepps'", "Did you mean 'steps'", "objective", "recipe 'cpu'"],
        ),
        (["--steps", "many"], ["steps=many", "whole number"]),
        (["--steps", "0"], ["steps 0"]),
        (["--objective", "rlhf"], ["unknown objective 'rlhf'", "softcost"]),
        (["--split", "end"], ["split=end", "uniform, boundary, mix"]),
        (["--position", "rotary"], ["position=rotary", "sinusoidal"]),
        (["--budgets", "square"], ["'square'", "truncated:B"]),
        (["--pins", "native"], ["--pins 'native'"]),
        (["--lr", "-1"], ["lr -1"]),
        (["--steps"], ["'--steps'", "--name value"]),
        (["steps", "3"], ["'steps'", "--name value"]),
        ([], ["nowhere holds no traces", "kvbench trace"]),
    ],
)
def test_train_refuses(options: list[str], words: list[str]) -> None:
    message = refused(*TRAIN, *options)
    assert all(word in message for word in words), message


def test_policies_without_a_trainer_are_refused() -> None:
    message = refused("train", "--policy", "tova", "--traces", "nowhere", "--out", "w.safetensors")
    assert "'tova' has nothing to train" in message
    message = refused("train", "--policy", "kvq", "--traces", "nowhere", "--out", "w.safetensors")
    assert "unknown policy 'kvq'" in message


def test_settings_reach_the_recipe(weights: str) -> None:
    _, shape, card, _ = read_weights(Path(weights))
    wanted = replace(RECIPES["cpu"], steps=20, hidden=16, pins="none", last_lr=1e-5)
    assert card["recipe"] == asdict(wanted)
    assert wanted.objective != KVPRecipe().objective  # or the recipe's own settings would not show
    assert shape.hidden == 16


def test_the_command_that_train_names_works(
    folder: str, traces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the model of the traces, if not the default, and quotes what a shell splits."""
    out = tmp_path / "my weights.safetensors"
    done = invoke(
        "train", "--policy", "kvp", "--traces", traces, "--out", out, "--steps", 2, "--hidden", 8
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = shlex.split(done.stdout.splitlines()[-1])
    assert told[:3] == ["next:", "kvbench", "run"]
    assert told[told.index("--model") + 1] == folder
    assert told[told.index("--policy") + 1] == f"kvp:weights={out}"
    asked = []
    monkeypatch.setattr(runner, "run", lambda config, *_: asked.append(config))
    invoke(*told[2:])
    assert (asked[0].model, asked[0].policies) == (folder, (f"kvp:weights={out}",))


def test_trained_weights_run(folder: str, weights: str, tmp_path: Path) -> None:
    with make.story_added():
        done = invoke(
            "run", "--policy", f"kvp:weights={weights},knorm", "--task", "story:length=60", "--model", folder,
            "--budgets", "24,30", "--limit", 2, "--out", tmp_path / "run",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = read_rows(tmp_path / "run")
    assert set(rows["status"]) == {"ok"}
    assert len(rows[rows["policy"] == "kvp"]) == 4


def test_eviction_error(weights: str, traces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.OpenModel, "load", lambda self: pytest.fail("a model was loaded"))
    done = invoke(
        "eviction-error", "--traces", traces, "--policy", f"kvp:weights={weights},oracle,knorm", "--budgets",
        "8,16", "--baseline", "knorm", "--per-head", "--out", tmp_path / "e",
    )  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    told = ("oracle", "eviction cost (", "missed mass (", "minus that of knorm", "next: kvbench plot")
    for words in (*told, f"rows: {tmp_path / 'e'}"):
        assert words in done.stdout
    heads = json.loads((tmp_path / "e" / "per_head.json").read_text())
    assert {len(table) for table in heads.values()} == {4}
    assert heads["oracle"] == [[pytest.approx(1)] * 2] * 4
    plotted = invoke("plot", tmp_path / "e", "--metric", "missed_mass", "--out", tmp_path / "figures")
    assert plotted.exit_code == 0, (plotted.output, plotted.exception)
    table = invoke("table", tmp_path / "e", "--format", "json", "--metric", "eviction_cost")
    assert {line["n"] for line in json.loads(table.stdout)} == {6}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "tofa"], ["unknown policy 'tofa'"]),
        (["--split", "end"], ["--split 'end'", "uniform or boundary"]),
        (["--pins", "4"], ["--pins '4'"]),
        (["--budgets", "0"], ["budget '0'"]),
        (["--traces", "nowhere"], ["nowhere holds no traces", "kvbench trace"]),
        (["--baseline", "tova"], ["unknown policy 'tova'", "one of --policy"]),
        (["--baseline", "tofa"], ["unknown policy 'tofa'"]),
        (["--limit", "0"], ["--limit 0"]),
        (["--limit", "-1"], ["--limit -1"]),
    ],
)
def test_eviction_error_refuses(traces: str, tmp_path: Path, options: list[str], words: list[str]) -> None:
    given = {"--traces": traces, "--policy": "knorm", "--out": str(tmp_path / "e")}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    message = refused("eviction-error", *[part for pair in given.items() for part in pair])
    assert all(word in message for word in words), message


def test_a_policy_that_fails_is_named_and_alone(traces: str, tmp_path: Path) -> None:
    command = ("eviction-error", "--traces", traces, "--budgets", "8", "--out", tmp_path / "out")
    with toy.added():
        done = invoke(*command, "--policy", "knorm,laws_faulty:fault=nan")
        alone = invoke(*command[:-1], tmp_path / "alone", "--policy", "laws_faulty:fault=nan")
    assert done.exit_code == alone.exit_code == FAILED
    assert "failed: laws_faulty:fault=nan: " in done.stderr
    assert "knorm" in done.stdout
    rows = read_rows(tmp_path / "out")
    assert set(rows.loc[rows["status"] == "failed", "spec"]) == {"laws_faulty:fault=nan"}
    assert len(rows[rows["spec"] == "knorm"]) == len(rows) // 2


def test_all_leaves_out_what_traces_cannot_rank(traces: str, tmp_path: Path) -> None:
    command = ("eviction-error", "--traces", traces, "--budgets", "8", "--out", tmp_path / "out")
    done = invoke(*command, "--policy", "all", "--baseline", "knorm")
    assert done.exit_code == 0, done.output
    told = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    left_out = {line.split()[1] for line in told}  # those of installed plugins among them
    ranked = set(read_rows(tmp_path / "out")["spec"])
    assert {"finch", "judgeq", "kvp", "q_filters"} <= left_out
    assert not left_out & ranked
    assert {"knorm", "oracle", "snapkv"} <= ranked
    assert not {"finch", "kvp"} & ranked
    assert "which traces do not hold" in refused(*command, "--policy", "knorm,finch")
