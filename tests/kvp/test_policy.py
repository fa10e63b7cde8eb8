"""KVP in the engine: the right agent for every layer, the same score for a token that stayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.audit.specimen import Specimen
from kvbench.contract.cell import Ranker
from kvbench.contract.observation import Observation
from kvbench.contract.registry import POLICIES, spec_of
from kvbench.contract.spec import parameters_of
from kvbench.engine.measure import Failure
from kvbench.errors import BadInput
from kvbench.learn.collect import TraceConfig, collect
from kvbench.model import open as models
from kvbench.model.open import LoadedModel, open_model
from kvbench.policies.kvp.checkpoint import read_weights
from kvbench.policies.kvp.command import TRAINER
from kvbench.policies.kvp.policy import KVP
from kvbench.policies.kvp.scorer import ScorerShape, ScorerWeights, position_features, scores
from kvbench.show.comparison_table import render_comparison
from kvbench.show.table import render
from kvbench.stats.aggregate import aggregate
from kvbench.stats.compare import compare
from tests.kvp import make
from tests.laws.lab import CHUNK, cell_of, cells_of, loaded, prompt_of, same_positions, try_out
from tests.tiny import HEAD_DIM, KV_HEADS, LAYERS

Call = tuple[Observation, Tensor]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every observation that a KVP policy scored, with its scores."""
    seen: list[Call] = []
    score = KVP.score

    def spy(self: KVP, observation: Observation) -> Tensor:
        found = score(self, observation)
        seen.append((observation, found))
        return found

    monkeypatch.setattr(KVP, "score", spy)
    return seen


def weights_of(tmp_path: Path, layers: int = LAYERS, position: Any = "log") -> str:
    shape = ScorerShape(layers, KV_HEADS, HEAD_DIM, hidden=8, position=position)
    return make.weights_file(tmp_path / f"{position}.safetensors", shape, "5e")


@pytest.mark.parametrize("position", ["none", "log", "sinusoidal"])
@pytest.mark.parametrize("arch", ["llama", "sliding"])
def test_a_kept_token_scores_the_same_in_every_chunk(
    tmp_path: Path, calls: list[Call], arch: str, position: str
) -> None:
    """Through the chunked loop: scores come from original positions, whatever was evicted meanwhile."""
    lm = loaded(arch)
    layers = lm.geometry.full_layers
    path = weights_of(tmp_path, len(layers), position)
    cells = cells_of([f"kvp:weights={path}"], [33], "chunked")
    try_out(lm, prompt_of(), cells)
    stacked, shape, *_ = read_weights(Path(path))
    known: dict[tuple[int, int, int], float] = {}
    again = 0
    for seen, found in calls:
        index = layers.index(seen.layer)
        features = position_features(seen.positions, shape.position)
        inputs = torch.cat([seen.keys, seen.values, features], -1)
        wanted = scores(stacked.agents_of(index, KV_HEADS), inputs)
        assert torch.allclose(found, wanted, atol=1e-3)  # the agents of this layer, not of another
        for head in range(KV_HEADS):
            pairs = zip(seen.positions[0, head].tolist(), found[0, head].tolist(), strict=True)
            for token, value in pairs:
                name = (seen.layer, head, token)
                again += name in known
                assert value == pytest.approx(known.setdefault(name, value), abs=1e-4)
    assert CHUNK == 24
    assert len(calls) == 3 * len(layers)  # chunks of 24, 24 and 22
    assert again == (24 + 33) * KV_HEADS * len(layers)
    assert len({round(value, 3) for value in known.values()}) > len(known) / 2


def test_what_is_kept_is_what_scored_best(tmp_path: Path, calls: list[Call]) -> None:
    """Native pins, the first 4 and last 16 tokens, then the best scores: after the prefill."""
    cells = cells_of([f"kvp:weights={weights_of(tmp_path)}"], [33])
    done = try_out(loaded("llama"), prompt_of(), cells)
    kept = done.kept(next(iter(cells)))
    for layer, (_, found) in enumerate(calls):
        for head in range(KV_HEADS):
            middle = found[0, head, 4:-16]
            best = (middle.topk(13).indices + 4).tolist()
            assert kept[layer][head].tolist() == sorted([*range(4), *best, *range(54, 70)])


@pytest.fixture(scope="module")
def trained(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five steps on traces of the tiny Llama."""
    root = tmp_path_factory.mktemp("trained")
    with make.story_added():
        settings = TraceConfig(("story",), 4, str(root / "t"), folder, length="60", device="cpu")
        collect(settings, progress=False)
    told: list[str] = []
    out = root / "w.safetensors"
    card = TRAINER.train(replace(make.QUICK, steps=5), root / "t", out, told.append)
    assert card == read_weights(out)[2]
    assert not out.with_name(out.name + ".state").exists()
    assert any("validation cost" in line for line in told)
    return str(out)


@pytest.mark.usefixtures("story")
def test_trained_weights_run_on_their_model(
    folder: str, tmp_path: Path, trained: str, calls: list[Call]
) -> None:
    config = kvbench.RunConfig(
        (f"kvp:weights={trained}", "knorm"), ("story:length=60",), (24, 30), folder, limit=2, device="cpu",
        out=str(tmp_path / "run"), schedule="chunked", chunk=32,
    )  # fmt: skip
    result = kvbench.run(config, progress=False)
    assert set(result.rows["status"]) == {"ok"}
    mine = result.rows[result.rows["policy"] == "kvp"]
    assert sorted(mine["kept"]) == [24, 24, 30, 30]
    assert calls


@pytest.mark.usefixtures("story")
def test_training_on_what_is_tested_is_told(folder: str, tmp_path: Path, trained: str) -> None:
    """Four stories of seed 0 trained the weights; those of another seed have other words."""
    found = {}
    for seed in (0, 1):
        config = kvbench.RunConfig(
            (f"kvp:weights={trained}", "knorm"), ("story:length=60",), (24,), folder, limit=2, seed=seed,
            device="cpu", out=str(tmp_path / str(seed)),
        )  # fmt: skip
        rows = kvbench.run(config, progress=False).rows
        shares = rows.groupby("policy", sort=False)["seen_share"].mean()
        assert shares.isna().to_dict() == {"full": True, "kvp": False, "knorm": True}
        text = render(aggregate(rows)) + render_comparison(compare(rows, metrics=["nll"]))
        found[seed] = shares["kvp"], text
    assert found[0][0] == 1.0
    assert found[0][1].count(
        "NOT UNSEEN TEXT. Of the 8-token runs of these prompts, weights were trained on 100% (kvp"
    )
    assert found[1][0] < 0.5
    assert found[1][1].count(f"weights were trained on {found[1][0]:.0%} (kvp") >= 2


def test_the_card_says_what_the_weights_are(folder: str, trained: str) -> None:
    _, shape, card, _ = read_weights(Path(trained))
    opened = open_model(folder, device="cpu")
    assert (shape.layers, shape.kv_heads, shape.dim, shape.hidden) == (LAYERS, KV_HEADS, HEAD_DIM, 16)
    assert card["model_sha256"] == opened.sha256
    assert card["recipe"]["steps"] == 5
    assert card["recipe"]["seed"] == 0
    assert card["data"]["tasks"] == ["story"]
    assert card["data"]["length"] == "60"
    assert card["traces"] == 4
    assert card["validation_cost"] >= 1


@pytest.mark.usefixtures("story")
@pytest.mark.parametrize("model", ["other weights", "other sizes"])
def test_weights_of_another_model_are_refused(
    folder: str, tmp_path: Path, trained: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model's weights load, with the commands that would train some."""
    monkeypatch.setattr(models.OpenModel, "load", lambda self: pytest.fail("weights were loaded"))
    if model == "other weights":
        (tmp_path / "m").mkdir()
        asked, weights = make.model_folder(tmp_path / "m", seed=1), trained
        reason = "another fingerprint"
    else:
        asked, weights = folder, weights_of(tmp_path, layers=7)
        reason = rf"\(7, {KV_HEADS}, {HEAD_DIM}\), .* has \({LAYERS}, {KV_HEADS}, {HEAD_DIM}\)"
    config = kvbench.RunConfig((f"kvp:weights={weights}",), ("story",), (24,), asked, out=str(tmp_path / "r"))
    with pytest.raises(BadInput, match=reason) as refused:
        kvbench.run(config, progress=False)
    for words in (f"kvbench trace --model {asked}", "kvbench train --policy kvp --traces", "kvp:weights="):
        assert words in str(refused.value)
    under = TraceConfig(
        ("story",), 1, str(tmp_path / "t"), asked, under=f"kvp:weights={weights}:24", device="cpu"
    )
    with pytest.raises(BadInput, match=reason):
        collect(under, progress=False)


def test_bound_once_and_still_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound policy reads no file and moves no weight when it scores, and no row can tell it apart."""
    lm = make_bindable()
    policy = POLICIES.parse(f"kvp:weights={weights_of(tmp_path)}")
    calls: list[KVP] = []
    bind = KVP.bind
    monkeypatch.setattr(KVP, "bind", lambda self, model: calls.append(self) or bind(self, model))
    cells = [cell_of(Ranker(policy, policy.pins), budget, "chunked") for budget in (8, 33)]
    first = try_out(lm, prompt_of(), cells)
    bound = lm.bind(policy)
    assert bound is not policy
    assert bound == policy
    assert hash(bound) == hash(policy)
    assert (spec_of(bound), bound.identity) == (spec_of(policy), policy.identity)
    assert parameters_of(bound) == parameters_of(policy)
    for name in ("load", "find_weights", "file_state"):
        monkeypatch.setattr(f"kvbench.policies.kvp.policy.{name}", forbidden)
    monkeypatch.setattr(ScorerWeights, "to", forbidden)
    monkeypatch.setattr(LoadedModel, "bind", lambda self, asked: bound)
    again = try_out(lm, prompt_of(), cells)
    assert all(same_positions(first.kept(cell), again.kept(cell)) for cell in cells)
    assert len(calls) == 1
    for layer, agents in zip(lm.geometry.full_layers, bound._agents, strict=True):
        assert agents.w1.device == lm.model.model.layers[layer].self_attn.q_proj.weight.device


def forbidden(*args: Any) -> Any:
    raise AssertionError("files and moves are for bind")


def make_bindable() -> LoadedModel:
    """A model to which nothing has been bound yet."""
    return replace(loaded("llama"))


def test_retrained_weights_are_bound_again(tmp_path: Path) -> None:
    lm = make_bindable()
    shape = ScorerShape(LAYERS, KV_HEADS, HEAD_DIM, hidden=8)
    path = tmp_path / "w.safetensors"
    policies = []
    for seed in (1, 1, 2):
        policies.append(lm.bind(KVP(weights=make.weights_file(path, shape, "5e", seed))))
    assert policies[0] is policies[1]
    assert not torch.equal(policies[0]._agents[0].w1, policies[2]._agents[0].w1)


def test_unbound_or_bound_to_another_geometry(tmp_path: Path) -> None:
    policy = KVP(weights=weights_of(tmp_path, layers=LAYERS + 1))
    with pytest.raises(BadInput, match=r"call bind\(model\) first"):
        policy.score(Specimen(5, KV_HEADS, 1, torch.float32, dim=HEAD_DIM).observe())
    cells = [cell_of(Ranker(policy, policy.pins), 33), *cells_of(["knorm"], [33])]
    done = try_out(loaded("llama"), prompt_of(), cells).done.cells
    failure = done[cells[0]]
    assert isinstance(failure, Failure)
    assert "policy 'kvp'" in failure.reason
    assert "(layers, KV heads, head size) (5, 2, 16), tiny-llama has (4, 2, 16)" in failure.reason
    assert not isinstance(done[cells[1]], Failure)


def test_native_pins_and_contract() -> None:
    policy = POLICIES.get("kvp")
    assert (policy().pins.first, policy().pins.last) == (4, 16)
    assert {need.name for need in policy.needs} == {"KEYS", "VALUES"}


@pytest.mark.usefixtures("story")
def test_all_leaves_out_what_was_trained_for_another_model(folder: str, tmp_path: Path) -> None:
    """`--policy all` on another model runs the policies that fit and says which one does not."""
    config = kvbench.RunConfig(("all",), ("story",), (24,), folder, limit=1, out=str(tmp_path / "r"))
    result = kvbench.run(config, progress=False)
    assert "kvp" not in set(result.rows["policy"])
    assert {"full", "random", "snapkv"} <= set(result.rows["policy"])
    assert [note for note in result.notes if note.startswith("kvp is left out: the weights of kvp")]


@pytest.mark.usefixtures("story")
def test_rows_of_retrained_weights_are_new(folder: str, tmp_path: Path) -> None:
    """Training again to the same file changes the rows' identity, so nothing stale is reported."""

    def run(seed: int) -> tuple[set[str], set[str]]:
        shape = ScorerShape(LAYERS, KV_HEADS, HEAD_DIM, hidden=8)
        sha256 = models.fingerprint_folder(Path(folder))
        specs = (f"kvp:weights={make.weights_file(tmp_path / 'w.safetensors', shape, sha256, seed)}",)
        config = kvbench.RunConfig(specs, ("story",), (24,), folder, limit=1, out=str(tmp_path / "r"))
        rows = kvbench.run(config, progress=False).rows
        return set(rows["key"][rows["policy"] == "kvp"]), set(rows["key"][rows["policy"] == "full"])

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert not first[0] & other[0]
    assert first[1] == other[1]


@pytest.mark.usefixtures("story")
def test_weights_of_the_same_model_in_another_file_can_be_forced(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row of theirs says so, and the table; rows without learned weights do not."""
    from kvbench.show.table import render

    file = make.weights_file(
        tmp_path / "w.safetensors", ScorerShape(LAYERS, KV_HEADS, HEAD_DIM, hidden=8), "f" * 64, 0
    )
    asked: dict[str, Any] = {"limit": 1, "device": "cpu", "out": str(tmp_path / "r")}
    specs = (f"kvp:weights={file}", "knorm")
    with pytest.raises(BadInput, match="--force-weights takes them and marks every row"):
        kvbench.run(kvbench.RunConfig(specs, ("story",), (24,), folder, **asked), progress=False)
    config = kvbench.RunConfig(specs, ("story",), (24,), folder, force_weights=True, **asked)
    result = kvbench.run(config, progress=False)
    marks = result.rows.set_index("policy")["weights_for"].to_dict()
    assert marks == {"full": "", "knorm": "", "kvp": "f" * 64}
    assert set(result.rows["status"]) == {"ok"}
    assert "--force-weights: trained for a model with another fingerprint: kvp" in render(
        result.table, "text"
    )
    other = weights_of(tmp_path, layers=7)
    config = kvbench.RunConfig(
        (f"kvp:weights={other}",), ("story",), (24,), folder, force_weights=True, **asked
    )
    with pytest.raises(BadInput, match="are for") as refused:
        kvbench.run(config, progress=False)
    assert "--force-weights" not in str(refused.value)
