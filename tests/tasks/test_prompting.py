"""What decides prompts and stops belongs to the run: a changed template, vocabulary or end token is refused,
a date in a template is pinned, and every row says which prompt it was measured on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.errors import StoreError
from kvbench.model.open import open_model
from kvbench.model.prompting import DATE, apply_template
from kvbench.study.config import RunConfig
from kvbench.study.runner import run
from tests.kvp import make
from tests.tiny import CHAT, tiny_model, tiny_tokenizer

DATED = "{{ strftime_now('%d %B %Y') }}: " + CHAT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", "sdpa").save_pretrained(tmp_path / "model")
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(file: Path, **changes: object) -> None:
    there = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(there | changes))


def change_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template=CHAT + " ")


def change_end(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[0, 7])


def change_special(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token="<|user|>")


@pytest.mark.parametrize("change", [change_template, change_end, change_special])
def test_what_decides_prompts_and_stops_is_part_of_the_model(folder: Path, change) -> None:
    before = open_model(str(folder)).prompting_sha256
    assert open_model(str(folder)).prompting_sha256 == before
    change(folder)
    assert open_model(str(folder)).prompting_sha256 != before


def test_a_run_is_not_continued_with_another_template(folder: Path, tmp_path: Path) -> None:
    config = RunConfig(
        ("knorm",), ("story",), (8,), model=str(folder), limit=1, out=str(tmp_path / "run"), device="cpu"
    )
    with make.story_added():
        first = run(config, progress=False)
        again = run(config, progress=False)
        assert (first.computed, again.computed) == (2, 0)
        edit(folder / "generation_config.json", eos_token_id=[0, 7])
        with pytest.raises(StoreError, match="prompting_sha256"):
            run(config, progress=False)


def test_folders_of_before_it_was_stored_go_on(folder: Path, tmp_path: Path) -> None:
    config = RunConfig(
        ("knorm",), ("story",), (8,), model=str(folder), limit=1, out=str(tmp_path / "run"), device="cpu"
    )
    with make.story_added():
        run(config, progress=False)
        manifest = tmp_path / "run" / "manifest.json"
        told = json.loads(manifest.read_text())
        known = told["fixed"].pop("prompting_sha256")
        manifest.write_text(json.dumps(told))
        assert run(config, progress=False).computed == 0
        assert json.loads(manifest.read_text())["fixed"]["prompting_sha256"] == known


def test_the_date_of_a_template_does_not_follow_the_calendar() -> None:
    text = apply_template(tiny_tokenizer(chat=True, template=DATED), [{"role": "user", "content": "hello"}])
    assert text.startswith(DATE.strftime("%d %B %Y"))


def test_rows_say_which_prompt_they_were_measured_on(folder: Path, tmp_path: Path) -> None:
    with make.story_added():
        rows = {
            template: run(
                RunConfig(
                    ("knorm",), ("story",), (8, 16), model=str(folder), limit=2, template=template,
                    out=str(tmp_path / template), device="cpu",
                ),
                progress=False,
            ).rows
            for template in ("chat", "none")
        }  # fmt: skip
    for found in rows.values():
        assert found.groupby("sample")["prompt_sha256"].nunique().tolist() == [1, 1]
        assert found["prompt_sha256"].nunique() == 2
    assert not set(rows["chat"]["prompt_sha256"]) & set(rows["none"]["prompt_sha256"])
