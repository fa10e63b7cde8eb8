"""Policies that rank by the question: it stays, the budget holds; they are refused where it is withheld."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbench
from kvbench.contract.registry import POLICIES
from kvbench.errors import BadInput
from kvbench.model.open import OpenModel
from tests.laws import toy
from tests.laws.kinds import asks
from tests.laws.lab import N, cells_of, loaded, prompt_of, try_out
from tests.laws.runs import config
from tests.tiny import DISTINCT, KV_HEADS

ASKING = [
    name
    for name in POLICIES.names()
    if name not in POLICIES.failures() and asks(POLICIES.parse(name)) and not POLICIES.get(name).trainer
]
QUESTION = 6


def test_there_are_some() -> None:
    assert "finch" in ASKING


@pytest.mark.parametrize("arch", DISTINCT)
@pytest.mark.parametrize("spec", ASKING)
def test_budgets(spec: str, arch: str) -> None:
    prompt = replace(prompt_of(), asked=QUESTION)
    cells = cells_of((spec, "knorm"), (QUESTION, 8, 33, N))
    done = try_out(loaded(arch), prompt, cells)
    for cell in cells:
        for positions in (done.kept(cell)[layer] for layer in loaded(arch).geometry.full_layers):
            assert positions.shape == (KV_HEADS, cell.budget)
            if cell.policy is not None and cell.policy.name == spec:
                assert (positions[:, -QUESTION:] == torch.arange(N - QUESTION, N)).all()
    alone = try_out(loaded(arch), prompt, [cells[1]])
    assert alone[cells[1]].outcome.nll == pytest.approx(done[cells[1]].outcome.nll, rel=1e-5)


@pytest.mark.parametrize("spec", [*ASKING, *(f"chunk_kv:base={name}" for name in ASKING)])
@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({}, "withholds"),
        ({"question": "seen", "schedule": "chunked", "chunk": 16}, "with the last chunk only"),
    ],
)
def test_refused_before_weights_load(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, rules: dict[str, Any], why: str
) -> None:
    monkeypatch.delattr(OpenModel, "load")
    with toy.added(), pytest.raises(BadInput, match=f"{why}.*--question seen") as error:
        kvbench.run(config(folder, tmp_path, policies=(spec, "knorm"), **rules), progress=False)
    assert "laws_toy" in str(error.value)
    assert not (tmp_path / "rows.jsonl").exists()


def test_all_leaves_them_out_and_says_so(folder: str, tmp_path: Path) -> None:
    with toy.added():
        asked = config(folder, tmp_path, policies=("all",), tasks=("laws_toy",), budgets=(8,), limit=1)
        withheld = kvbench.run(asked, progress=False)
        assert not set(ASKING) & set(withheld.rows["policy"])
        for name in ASKING:
            assert any(note.startswith(f"{name} is left out") for note in withheld.notes)
        seen = kvbench.run(replace(asked, question="seen", out=str(tmp_path / "seen")), progress=False)
        whole = seen.rows[seen.rows["status"] == "ok"]
        assert set(ASKING) <= set(whole["policy"])
