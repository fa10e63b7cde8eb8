"""A rotation that depends on the length of the input is the plain model's, whatever pieces are read."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvbench.contract.cell import Cell, Schedule
from kvbench.contract.registry import POLICIES
from kvbench.contract.task import Sample
from kvbench.engine.evaluate import evaluate
from kvbench.engine.measure import Failure
from kvbench.errors import UnsupportedModel
from kvbench.learn.record import record
from kvbench.model.geometry import read_geometry
from kvbench.model.hook import install
from kvbench.model.lm import LoadedModel
from kvbench.model.prompt import Continuation, Prompt
from kvbench.model.rotation import Rotation
from kvbench.study.config import RunConfig
from kvbench.study.runner import run
from tests.laws.lab import KEY
from tests.tiny import HEAD_DIM, tiny_config, tiny_loaded, tiny_tokenizer

BORDER, MOST = 128, 512
FACTORS = [1.0 + index for index in range(HEAD_DIM // 2)]
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * len(FACTORS), "long_factor": FACTORS}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": BORDER}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
ROPES = {"phi3": LONGROPE, "yarn": YARN, "dynamic": DYNAMIC}
QUESTION, REFERENCE = 5, 6
LENGTHS = [20, BORDER - QUESTION - REFERENCE, BORDER - QUESTION - REFERENCE + 1, BORDER - 4, BORDER + 40]


def rotated(arch: str, rope: dict[str, Any]) -> Any:
    """A tiny configuration with this rotation, and nothing else changed."""
    stretched = rope["rope_type"] == "longrope"
    given = tiny_config(arch).to_dict() | {
        "rope_parameters": {"rope_theta": 10000.0, **rope},
        "max_position_embeddings": MOST if stretched else BORDER,
    }
    if stretched:
        given["original_max_position_embeddings"] = BORDER
    del given["transformers_version"]
    return transformers.AutoConfig.for_model(given.pop("model_type"), **given)


@cache
def models(kind: str) -> tuple[LoadedModel, Any]:
    """The model in our engine, and the same one plain."""
    install()
    config = rotated("phi3" if kind == "phi3" else "llama", ROPES[kind])
    ours, plain = (
        transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32
        ).eval()
        for attention in ("kvbench", "sdpa")
    )
    plain.load_state_dict(ours.state_dict())
    lm = replace(tiny_loaded(), model=ours, geometry=read_geometry(config))
    return lm, plain


def sampled(n: int, seed: int = 0) -> tuple[Sample, Prompt]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 300, (n + QUESTION + REFERENCE,), generator=draw).tolist()
    context, question, reference = ids[:n], ids[n : n + QUESTION], ids[n + QUESTION :]
    prompt = Prompt(tuple(context), tuple(question), (), Continuation(tuple(reference), REFERENCE))
    return Sample("s", "context", "question", "reference", max_new_tokens=3), prompt


@torch.inference_mode()
def plain_nll(plain: Any, prompt: Prompt) -> float:
    ids = torch.tensor([[*prompt.context, *prompt.question, *prompt.reference.ids]])
    logprobs = plain(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    wanted = torch.tensor(prompt.reference.ids)[:, None]
    return -logprobs[-REFERENCE - 1 : -1].gather(1, wanted).mean().item()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("kind", ["phi3", "yarn"])
def test_with_room_for_everything_it_is_the_plain_model(kind: str, n: int) -> None:
    """nll of a context and a question that are read in two pieces, or in chunks, across the border."""
    lm, plain = models(kind)
    sample, prompt = sampled(n)
    policy = POLICIES.parse("knorm")
    chunked = Cell(policy, n, schedule=Schedule("chunked", 16))
    found = evaluate(lm, sample, prompt, [Cell(policy, n), chunked], KEY)
    wanted = plain_nll(plain, prompt)
    for measured in (found.full, *found.cells.values()):
        assert not isinstance(measured, Failure)
        assert measured.outcome.nll == pytest.approx(wanted, abs=1e-4)


def test_samples_do_not_change_each_other() -> None:
    lm, _ = models("phi3")
    short, long = sampled(20), sampled(BORDER + 40)
    first = evaluate(lm, *short, [], KEY).full.outcome.nll
    evaluate(lm, *long, [], KEY)
    assert evaluate(lm, *short, [], KEY).full.outcome.nll == first
    assert not any(module._forward_hooks for module in lm.model.modules())


def test_traces_hold_the_keys_of_the_plain_model() -> None:
    lm, _ = models("phi3")
    _, prompt = sampled(BORDER - 4)
    whole, *_ = record(lm, prompt, torch.float32, None, "a")
    parts, *_ = record(lm, prompt, torch.float32, Cell(POLICIES.parse("knorm"), BORDER), "a")
    for (_, one, _), (_, two, _) in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=0)


def test_extra_tokens_behind_the_border_fail_their_policy_alone() -> None:
    lm, _ = models("phi3")
    with lm.rotation.whole(BORDER - 1):
        assert lm.rotation.fits(BORDER)
        assert not lm.rotation.fits(BORDER + 1)
    with lm.rotation.whole(BORDER + 1):
        assert lm.rotation.fits(BORDER + 9)


def test_a_model_without_a_module_to_tell_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="beyond 128 tokens"):
        Rotation(tiny_loaded().model, BORDER)


@pytest.mark.parametrize(("kind", "status"), [("yarn", "ok"), ("phi3", "ok"), ("dynamic", "skipped")])
def test_what_the_model_reads_is_measured(kind: str, status: str, tmp_path: Path) -> None:
    """YaRN reads factor x original; dynamic NTK changes with every token beyond the original length."""
    lm, _ = models(kind)
    lm.model.save_pretrained(tmp_path / "model")
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    asked = RunConfig(
        ("knorm",), ("needle:length=400",), (16,), model=str(tmp_path / "model"), limit=1, device="cpu",
        out=str(tmp_path / "run"),
    )  # fmt: skip
    assert set(run(asked, progress=False).rows["status"]) == {status}


def test_dynamic_factors_do_not_change_within_what_is_read() -> None:
    lm, plain = models("dynamic")
    sample, prompt = sampled(BORDER - QUESTION - REFERENCE)
    assert evaluate(lm, sample, prompt, [], KEY).full.outcome.nll == pytest.approx(
        plain_nll(plain, prompt), abs=1e-4
    )
