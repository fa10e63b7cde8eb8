"""A policy that looks at what it did not declare is stopped, in a run as in `kvbench check`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.engine.score import validated_score
from kvbench.errors import PluginError
from tests.scene import scene

READS: dict[str, tuple[Need, Callable[[Observation], Tensor]]] = {
    "values.float": (Need.VALUES, lambda seen: seen.values.float().norm(dim=-1)),
    "keys.norm": (Need.KEYS, lambda seen: seen.keys.norm(dim=-1)),
    "torch.norm of keys": (Need.KEYS, lambda seen: torch.linalg.vector_norm(seen.keys, dim=-1)),
    "values times 2": (Need.VALUES, lambda seen: (seen.values * 2).sum(-1)),
    "keys[...]": (Need.KEYS, lambda seen: seen.keys[..., 0]),
    "rotary": (Need.ROTARY, lambda seen: seen.positions * seen.rotary(0, 3).cos.sum()),
    "unrotated": (Need.UNROTATED_KEYS, lambda seen: seen.unrotated_keys.sum(-1)),
    "moments": (Need.QUERY_MOMENTS, lambda seen: seen.positions * seen.query_moments(4).mean.sum()),
    "output norms": (Need.OUTPUT_WEIGHTS, lambda seen: seen.by_group(seen.output_norms).mean(2)),
    "output sums": (Need.OUTPUT_WEIGHTS, lambda seen: seen.by_group(seen.output_sums).mean(2)),
    "output gram": (Need.OUTPUT_WEIGHTS, lambda seen: seen.positions * seen.output_gram.sum()),
    "question": (Need.QUESTION, lambda seen: seen.positions * seen.question_tokens),
    "window": (Need.WINDOW_QUERIES, lambda seen: seen.by_group(seen.window_attention(1)[:, :, 0]).mean(2)),
}


def policy(needs: set[Need], read: Callable[[Observation], Tensor]) -> Policy:
    class Curious(Policy):
        def score(self, seen: Observation) -> Tensor:
            return read(seen).float()

    Curious.name, Curious.needs = "curious", frozenset(needs)
    return Curious()


@pytest.mark.parametrize("name", READS)
def test_reading_without_declaring_is_an_error(name: str) -> None:
    need, read = READS[name]
    with pytest.raises(PluginError, match=r"'curious'.*not declared"):
        validated_score(policy(set(Need) - {need}, read), scene(12))


@pytest.mark.parametrize("name", READS)
def test_declared_is_enough(name: str) -> None:
    """Shared work may use keys inside: a policy that asks for attention need not declare them."""
    need, read = READS[name]
    assert validated_score(policy({need}, read), scene(12)).shape == (1, 2, 12)
