"""Hidden states: what every attention module receives, found by who calls our hook, not by a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvbench.contract.cell import Cell
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.engine.evaluate import evaluate
from kvbench.model.geometry import read_geometry
from kvbench.model.hook import install
from kvbench.model.open import LoadedModel
from tests.laws.lab import KEY, N, loaded, measured, prompt_of, sample_of
from tests.tiny import ARCHS, LAYERS, QUERY_HEADS, tiny_tokenizer

OTHERS = {  # architectures whose parts have other names or take their arguments otherwise
    "gpt_neox": ("gpt_neox.layers", "attention"),
    "olmo2": ("model.layers", "self_attn"),
    "starcoder2": ("model.layers", "self_attn"),
    "glm": ("model.layers", "self_attn"),
}


def other_model(kind: str) -> LoadedModel:
    """A tiny random model of one of OTHERS under our attention."""
    install()
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="kvbench")
    return LoadedModel(
        model.eval().requires_grad_(False), tiny_tokenizer(), kind, None, "0", torch.device("cpu"),
        torch.float32, read_geometry(config), frozenset({0}),
    )  # fmt: skip


@dataclass(frozen=True)
class Watcher(Policy):
    """Keeps what it is shown of every layer."""

    name = "watcher"
    needs = frozenset({Need.HIDDEN_STATES})

    def score(self, seen: Observation) -> Tensor:
        SHOWN[seen.layer] = seen.hidden_states.clone()
        return seen.positions.float()


SHOWN: dict[int, Tensor] = {}


def assert_shown(lm: LoadedModel, layers: Any, name: str) -> None:
    """The policy sees what the modules at this place receive in the prefill."""
    received: dict[int, Tensor] = {}

    def hook(index: int) -> Any:
        def note(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if hidden.shape[1] == N:
                received[index] = hidden.clone()

        return note

    handles = [
        getattr(layer, name).register_forward_pre_hook(hook(index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    SHOWN.clear()
    try:
        done = evaluate(lm, sample_of(prompt_of()), prompt_of(), [Cell(Watcher(), 8)], KEY)
    finally:
        for handle in handles:
            handle.remove()
    assert [measured(found).kept for found in done.cells.values()] == [8]
    assert list(SHOWN) == list(lm.geometry.full_layers)
    for layer, hidden in SHOWN.items():
        assert hidden.shape == (1, N, lm.description.width)
        assert torch.equal(hidden, received[layer])
    assert len({float(hidden.abs().sum()) for hidden in SHOWN.values()}) == len(SHOWN)


@pytest.mark.parametrize("arch", ARCHS)
def test_hidden_states_are_what_attention_receives(arch: str) -> None:
    lm = loaded(arch)
    assert lm.description.width == QUERY_HEADS * 16
    assert_shown(lm, lm.model.model.layers, "self_attn")


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures(kind: str) -> None:
    lm = other_model(kind)
    layers, name = OTHERS[kind]
    assert_shown(lm, lm.model.get_submodule(layers), name)


def test_names_do_not_matter() -> None:
    """An attention of another name is found, and what only looks like attention is not."""
    lm = other_model("olmo2")
    for layer in lm.model.model.layers:
        own = type(layer.self_attn)
        layer.self_attn.__class__ = type("Mixer", (own,), {})
        layer.mlp.__class__ = type("FakeAttention", (type(layer.mlp),), {})
        layer.mlp.layer_idx = layer.self_attn.layer_idx
    assert {type(module).__name__ for module in lm.attention_modules.values()} == {"Mixer"}
    assert_shown(lm, lm.model.model.layers, "self_attn")


def test_the_model_has_no_hooks_left() -> None:
    lm = loaded("llama")
    evaluate(lm, sample_of(prompt_of()), prompt_of(), [Cell(Watcher(), 8)], KEY)
    assert not any(module._forward_pre_hooks for module in lm.model.modules())
