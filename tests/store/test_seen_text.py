"""How much of a prompt the weights of a policy were trained on: measured by content, kept in the weights'
file, and told wherever the numbers are."""

from __future__ import annotations

import random

import pytest

from kvbench.contract.seen_text import MOST, SeenText
from kvbench.contract.weights import save_tensors, seen_tensors, split_seen


def tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(49152) for _ in range(count)]


def test_a_text_knows_itself_and_no_other():
    one, other = tokens(1, 500), tokens(2, 500)
    seen = SeenText.of([one])
    assert seen.share(one) == 1.0
    assert seen.share(other) == 0.0


def test_the_share_is_that_of_runs_wherever_they_stand():
    one, other = tokens(1, 500), tokens(2, 300)
    prompt = other[:107] + one[200:307] + other[107:]
    # 107 copied tokens have 100 runs of 8; the prompt of 407 has 400.
    assert SeenText.of([one]).share(prompt) == pytest.approx(100 / 400)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_what_has_no_run_of_eight_has_no_share(count):
    assert SeenText.of([tokens(1, 50)]).share(tokens(1, count)) is None
    assert SeenText.of([tokens(1, count)]).share(tokens(1, 50)) == 0.0


def test_a_large_text_is_sampled_and_still_measured():
    long = tokens(3, 4 * MOST)
    seen = SeenText.of([long])
    assert MOST / 2 < len(seen.hashes) <= MOST
    assert seen.every >= 4
    half = long[5000:7000] + tokens(4, 2000)
    assert seen.share(half) == pytest.approx(0.5, abs=0.1)
    assert seen.share(tokens(5, 4000)) < 0.01


def test_small_ids_are_told_apart():
    """Token ids are small and near each other: their hashes must not be."""
    seen = SeenText.of([[i % 40 for i in range(start, start + 9)] for start in range(40)])
    assert len(seen.hashes) == 40
    assert seen.share([(3 * i) % 40 for i in range(100)]) == 0.0


def test_files_hold_it_beside_the_weights(tmp_path):
    import torch
    from safetensors import safe_open

    seen = SeenText.of([tokens(1, 500)])
    extra, told = seen_tensors(seen)
    save_tensors(tmp_path / "w.safetensors", {"weight": torch.ones(2), **extra}, told)
    with safe_open(str(tmp_path / "w.safetensors"), framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rest, again = split_seen(stored, file.metadata())
    assert list(rest) == ["weight"]
    assert again.share(tokens(1, 500)) == 1.0
    assert again.share(tokens(2, 500)) == 0.0
    assert split_seen({"weight": torch.ones(2)}, {})[1] is None
