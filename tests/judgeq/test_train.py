"""Training: where the gradient goes, that it is exact, and that the same lesson gives the same rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.errors import BadInput
from kvbench.learn.trace import TraceSet
from kvbench.model.open import LoadedModel
from kvbench.policies.judgeq import train as training
from kvbench.policies.judgeq.lesson import Lesson, model_of, read_soft, save_memory
from kvbench.policies.judgeq.recipe import RECIPES, JudgeQRecipe
from kvbench.policies.judgeq.train import initial_rows, train
from tests.judgeq import make
from tests.judgeq.make import QUICK
from tests.tiny import LAYERS, tiny_model


@pytest.fixture(scope="module")
def lesson(traces: TraceSet) -> Lesson:
    return Lesson.of(traces[0], LAYERS, traces.infos[0].context, torch.device("cpu"))


def gradient(lm: LoadedModel, lesson: Lesson, rows: Tensor) -> tuple[float, Tensor]:
    rows = rows.clone().requires_grad_()
    loss = read_soft(lm, lesson, rows).loss()
    loss.backward()
    assert rows.grad is not None
    return loss.item(), rows.grad


def test_only_the_soft_rows_learn(lm: LoadedModel, lesson: Lesson) -> None:
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    _, grad = gradient(lm, lesson, make.drawn())
    assert (grad.norm(dim=1) > 0).all()
    assert all(parameter.grad is None for parameter in lm.model.parameters())
    assert not any(tensor.requires_grad for tensor in [*lesson.keys, *lesson.values, *lesson.wanted])
    assert all(torch.equal(tensor, before[name]) for name, tensor in lm.model.state_dict().items())


def test_the_gradient_is_that_of_the_whole_sequence(traces: TraceSet, tmp_path: Path) -> None:
    """A plain model reads context, soft tokens and response; nothing is recorded, cut or kept constant."""
    from kvbench.contract.task import Setting
    from tests.kvp.make import Story
    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    info = traces.infos[0]
    count = lambda sample: len(tokenizer(sample.context + sample.question)["input_ids"])  # noqa: E731
    setting = Setting(seed=0, limit=1, data=None, chat=False, count=count, render=str, ends=len)
    sample = Story(length=50).samples(setting).samples[0]
    ids = tokenizer(sample.context + sample.question + sample.reference)["input_ids"]
    assert len(ids) == info.tokens  # the sample that was recorded
    model = tiny_model("llama", "eager")
    n = info.context

    def attentions(inputs: Tensor) -> Any:
        return model(inputs_embeds=inputs[None], output_attentions=True, use_cache=False).attentions

    table = model.get_input_embeddings().weight
    with torch.no_grad():
        wanted = [layer[0, :, n:, :n].mean(1) for layer in attentions(table[torch.tensor(ids)])]
    rows = make.drawn().requires_grad_()
    shown = [
        layer[0, :, n:, :n].mean(1) for layer in attentions(torch.cat([table[torch.tensor(ids[:n])], rows]))
    ]
    loss = torch.stack([(a - b).square().sum(1).mean() for a, b in zip(shown, wanted, strict=True)]).mean()
    loss.backward()
    mine = gradient(model_of(traces), Lesson.of(traces[0], LAYERS, n, torch.device("cpu")), make.drawn())
    assert mine[0] == pytest.approx(loss.item(), rel=1e-4)
    assert rows.grad is not None
    assert torch.allclose(mine[1], rows.grad, atol=1e-6, rtol=1e-3)


def test_checkpointing_changes_nothing(traces: TraceSet, lesson: Lesson) -> None:
    lm = model_of(traces)
    wanted = gradient(lm, lesson, make.drawn())
    save_memory(lm)
    calls: list[int] = []
    hook = lm.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    found = gradient(lm, lesson, make.drawn())
    hook.remove()
    assert len(calls) == 2  # once forward, and again for the gradient
    assert found[0] == wanted[0]
    assert torch.allclose(found[1], wanted[1], atol=1e-7)


def test_rows_begin_as_real_tokens(lm: LoadedModel) -> None:
    table = lm.model.get_input_embeddings().weight
    rows = initial_rows(replace(QUICK, tokens=5), lm)
    ids = [int((table == row).all(1).nonzero()[0]) for row in rows]
    assert len(set(ids)) == 5
    assert not set(ids) & set(lm.tokenizer.all_special_ids)
    assert not torch.equal(rows, initial_rows(replace(QUICK, tokens=5, seed=1), lm))
    text = lm.tokenizer(" the answer is", add_special_tokens=False)["input_ids"]
    rows = initial_rows(replace(QUICK, tokens=len(text) + 1, start=" the answer is"), lm)
    assert torch.equal(rows, table[torch.tensor([*text, text[0]])])


def test_it_learns_and_is_deterministic(traces: TraceSet, lm: LoadedModel) -> None:
    rows, curve = train(QUICK, traces, lm)
    assert curve.steps == [0, QUICK.steps]
    assert curve.loss[-1] < 0.8 * curve.loss[0]
    assert len(curve.training) == QUICK.steps
    again, same = train(QUICK, traces, lm)
    assert torch.equal(rows, again)
    assert vars(same) == vars(curve)
    other, _ = train(replace(QUICK, seed=1), traces, lm)
    assert not torch.equal(rows, other)


def test_an_interrupted_training_ends_alike(
    traces: TraceSet, lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MEASURED", 5)
    wanted, curve = train(QUICK, traces, lm)

    class Killed(Exception):
        pass

    def stop(step: int, curve: Any) -> None:
        if step == 10:
            raise Killed

    state = tmp_path / "state"
    with pytest.raises(Killed):  # after the measurement, before its state is saved: 5 steps are kept
        train(QUICK, traces, lm, state, stop)
    reported: list[int] = []
    found, continued = train(QUICK, traces, lm, state, lambda step, curve: reported.append(step))
    assert reported == [10, 12]
    assert torch.equal(found, wanted)
    assert vars(continued) == vars(curve)
    with pytest.raises(BadInput, match="another recipe or other traces"):
        train(replace(QUICK, lr=0.5), traces, lm, state)


def test_batches_average(traces: TraceSet, lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two traces in one update give the mean of their gradients."""
    lessons = [Lesson.of(traces[i], LAYERS, traces.infos[i].context, torch.device("cpu")) for i in (0, 1)]
    rows = make.drawn().requires_grad_()
    training._step(replace(QUICK, lr=1e-9), lm, lessons, rows, torch.optim.Adam([rows]), 0)
    wanted = sum(gradient(lm, lesson, rows.detach())[1] for lesson in lessons) / 2
    assert rows.grad is not None
    assert torch.allclose(rows.grad, wanted, atol=1e-7)


def test_other_models_and_missing_layers_are_refused(tmp_path: Path) -> None:
    found = make.recorded(tmp_path, "sliding", samples=2)
    with pytest.raises(BadInput, match="sliding window"):
        model_of(found)
    found.header["model_sha256"] = "another"
    with pytest.raises(BadInput, match="another model"):
        model_of(found)


def test_recipe() -> None:
    recipe = next(iter(RECIPES.values()))
    assert (recipe.tokens, recipe.split) == (32, "boundary")
    for change, message in (
        ({"steps": -1}, "steps -1"),
        ({"tokens": 0}, "tokens 0"),
        ({"batch": 0}, "batch 0"),
        ({"validation": 1.0}, "validation 1.0"),
        ({"lr": 0.0}, "lr 0.0"),
        ({"split": "end"}, "--split 'end'"),
        ({"start": ""}, "--start"),
    ):
        with pytest.raises(BadInput, match=message):
            JudgeQRecipe(**change)  # type: ignore[arg-type]
