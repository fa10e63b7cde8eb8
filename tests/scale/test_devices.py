"""B04: layers on different devices. Every tensor of a layer stays on its device, and the numbers stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvbench.audit.specimen import Specimen
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES
from kvbench.contract.shared_work import SharedWork
from kvbench.engine.cache import Cache
from kvbench.engine.evaluate import evaluate
from kvbench.engine.order import rank
from kvbench.errors import BadInput
from kvbench.model.open import open_model
from tests.kvp import make
from tests.laws import lab
from tests.laws.lab import SCHEDULES, SPECS, cells_of, prompt_of, try_out
from tests.scale.devices import TYPE, Mixed, pretended, real, register, split
from tests.tiny import HEAD_DIM, KV_HEADS, LAYERS, tiny_loaded

if not hasattr(torch._C, "_acc"):
    pytest.skip("this torch has no place for a device written in Python", allow_module_level=True)
register()
HERE, THERE = torch.device(TYPE, 0), torch.device(TYPE, 1)
LAYOUT = [HERE, HERE, THERE, THERE]


@pytest.fixture
def kvp(tmp_path: Path) -> str:
    from kvbench.policies.kvp.scorer import ScorerShape

    shape = ScorerShape(LAYERS, KV_HEADS, HEAD_DIM, hidden=8)
    return f"kvp:weights={make.weights_file(tmp_path / 'random.safetensors', shape, '5e')}"


def test_devices_do_not_mix() -> None:
    with pretended():
        here, there = (torch.ones(3, device=device) for device in (HERE, THERE))
        assert (here + here).device == HERE
        assert float((here + 1).sum()) == 6
        assert here.to(THERE).device == THERE
        for wrong in (lambda: here + there, lambda: here + torch.ones(3), lambda: torch.stack([here, there])):
            with pytest.raises(Mixed):
                wrong()


@pytest.mark.parametrize("arch", ["llama", "sliding"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_split_model_gives_the_same_numbers(
    schedule: str, arch: str, kvp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers on one device, two on another: every policy, the whole engine."""
    specs = SPECS if arch == "sliding" else (*SPECS, kvp)  # those weights are for four full layers
    cells = cells_of(specs, (33,), schedule)
    one = try_out(tiny_loaded(arch), prompt_of(), cells)
    original, places = Cache._gathered, []

    def spy(self: Cache, *args: Any) -> Any:
        bucket = original(self, *args)
        places.extend(
            (layer, tensor.device)
            for held in (bucket.keys, bucket.values, bucket.positions)
            for layer, tensor in enumerate(held)
        )
        return bucket

    lm = tiny_loaded(arch)
    with pretended(), monkeypatch.context() as patch:
        patch.setattr(Cache, "_gathered", spy)
        patch.setattr(lab, "evaluate", torch.no_grad()(evaluate.__wrapped__))  # inference mode cannot pretend
        model = split(lm.model, LAYOUT)
        two = try_out(replace(lm, model=model, device=HERE), prompt_of(), cells)
    assert places
    assert all(device == LAYOUT[layer] for layer, device in places)
    for cell in cells:
        pairs = zip(one.kept(cell), two.kept(cell), strict=True)
        assert all(torch.equal(a, real(b)) for a, b in pairs), cell
        assert two[cell].outcome.answer.text == one[cell].outcome.answer.text
        assert two[cell].outcome.nll == pytest.approx(one[cell].outcome.nll, abs=1e-4)
        assert two[cell].missed_mass == pytest.approx(one[cell].missed_mass, abs=1e-4)


def policies() -> list[str]:
    broken = POLICIES.failures()
    return [name for name in POLICIES.names() if name not in broken]


@pytest.mark.parametrize("kind", ["plain", "gaps"])
@pytest.mark.parametrize("name", policies())
def test_a_score_stays_with_its_layer(name: str, kind: Any) -> None:
    """On a second device it is what it was, and no number is asked for on the way."""
    policy: Policy = POLICIES.parse(name)
    if kind == "gaps" and not policy.chunked:
        pytest.skip("it is never asked to")
    trained = policy.trained_for
    heads, dim = (KV_HEADS, HEAD_DIM) if trained is None else (trained.kv_heads, trained.head_dim)
    specimen = Specimen(40, heads, 3, torch.bfloat16, kind, dim, 2 if trained is None else trained.layers)
    seen, model = specimen.observe((0,)), specimen.model
    expected = policy.bind(model).score(seen.limited_to(policy.needs))
    with pretended():  # weights are placed before anything is scored
        bound = policy.bind(replace(model, devices=(THERE,) * len(model.devices)))
    with pretended(asking=False):
        there = moved(seen)
        score = bound.score(there.limited_to(policy.needs))
        order = rank(score, there.positions, policy.pins, there.seen)
    assert score.device == order.device == THERE
    assert score.dtype == torch.float32
    assert torch.equal(real(order), rank(expected, seen.positions, policy.pins, seen.seen))


def test_a_spread_model_is_asked_of_accelerate(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda:all` here: what transformers is asked for, and what is refused when GPUs are too small."""
    opened = open_model(folder, "cuda:all", tried=False)
    assert (opened.device, opened.spread, opened.dtype) == (torch.device("cuda:0"), True, torch.bfloat16)
    original, asked = transformers.AutoModelForCausalLM.from_pretrained, []

    def loading(*args: Any, device_map: Any, **kwargs: Any) -> Any:
        asked.append(device_map)
        model, report = original(*args, **kwargs)
        model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
        return model, report

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loading)
    with pytest.raises(BadInput, match="cannot hold model"):
        opened.load()
    assert asked == ["balanced"]
    with pytest.raises(BadInput, match="cannot be used here"):
        open_model(folder, "cuda:all")


def moved(seen: Observation) -> Observation:
    """The same layer on the second device."""
    future = None if seen._future is None else seen._future().to(THERE)
    changes: dict[str, Any] = {
        name: value.to(THERE) for name, value in vars(seen).items() if isinstance(value, Tensor)
    }
    if seen._probe is not None:
        changes["_probe"] = type(seen._probe)(*(part.to(THERE) for part in vars(seen._probe).values()))
    if seen._parts is not None and seen._parts.output is not None:
        output = replace(seen._parts.output, weight=seen._parts.output.weight.to(THERE))
        changes["_parts"] = replace(seen._parts, output=output)
    return replace(seen, _future=lambda: future, _shared=SharedWork(), **changes)
