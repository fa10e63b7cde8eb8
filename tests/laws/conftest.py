"""Toys and model folders for the laws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.laws import toy
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def toys() -> Iterator[None]:
    with toy.added():
        yield


def saved(folder: Path, chat: bool, bos: bool) -> str:
    tiny_model("llama", "sdpa").save_pretrained(folder)
    tiny_tokenizer(chat=chat, bos=bos).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny Llama as a model folder, its tokeniser without template."""
    return saved(tmp_path_factory.mktemp("model"), chat=False, bos=False)


@pytest.fixture(scope="package", params=["plain", "bos", "chat", "chat+bos"])
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with every kind of tokeniser."""
    where = tmp_path_factory.mktemp("models")
    return saved(where, chat="chat" in request.param, bos="bos" in request.param)
