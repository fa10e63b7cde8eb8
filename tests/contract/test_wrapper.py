"""A policy that wraps another one: what it reads, pins and fits is the base's; specs carry the base whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import param
from kvbench.contract.registry import POLICIES, register, spec_of, split_specs
from kvbench.contract.spec import parameters_of, split_name
from kvbench.contract.wrapper import Wrapper
from kvbench.errors import BadInput, UnknownName


@dataclass(frozen=True)
class Doubled(Wrapper):
    """The base's score, times a number."""

    own = frozenset({Need.VALUES})

    times: float = param(2.0, "none")

    def score(self, seen: Observation) -> torch.Tensor:
        return self.base_score(seen) * self.times


@pytest.fixture(autouse=True)
def added() -> Iterator[None]:
    with (
        patch.object(POLICIES, "_places", dict(POLICIES._found())),
        patch.object(POLICIES, "_classes", dict(POLICIES._classes)),
    ):
        register("doubled", source="tests")(Doubled)
        yield


def test_what_it_reads_pins_and_fits_is_the_bases() -> None:
    policy, base = (
        POLICIES.parse("doubled:base=(snapkv:window=8,kernel=5)"),
        POLICIES.parse("snapkv:window=8"),
    )
    assert policy.needs == base.needs | {Need.VALUES}
    assert policy.pins == base.pins
    assert POLICIES.parse("doubled:base=kvp").identity == POLICIES.parse("kvp").identity
    assert POLICIES.parse("doubled:base=kvp").trained_for == POLICIES.parse("kvp").trained_for
    assert POLICIES.parse("doubled:base=kvp").seen_text is POLICIES.parse("kvp").seen_text


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("doubled", "doubled"),
        ("doubled:base=snapkv", "doubled"),
        ("doubled:base=knorm,times=3", "doubled:base=knorm,times=3.0"),
        ("doubled:base=(snapkv:window=32)", "doubled"),
        ("doubled:base=snapkv:window=8", "doubled:base=(snapkv:window=8)"),
        ("doubled:times=3,base=(snapkv:kernel=5)", "doubled:base=(snapkv:kernel=5),times=3.0"),
    ],
)  # fmt: skip
def test_specs_are_canonical_and_parse_back(written: str, canonical: str) -> None:
    policy = POLICIES.parse(written)
    assert spec_of(policy) == canonical
    assert POLICIES.parse(canonical) == policy
    assert split_specs(f"tova,{canonical},knorm") == ["tova", canonical, "knorm"]
    assert parameters_of(policy)["base"] == policy.base


def test_brackets_nest() -> None:
    text = "doubled:base=(other:base=(snapkv:window=8,kernel=5),times=2),times=3"
    name, values = split_name(text)
    assert (name, values["times"]) == ("doubled", "3")
    assert split_name(values["base"])[1] == {"base": "snapkv:window=8,kernel=5", "times": "2"}


@pytest.mark.parametrize("text", ["doubled:base=(snapkv", "doubled:base=snapkv)", "doubled:base=)snapkv("])
def test_a_bracket_without_its_pair_is_refused(text: str) -> None:
    for read in (split_specs, split_name):
        with pytest.raises(BadInput, match="bracket has no pair"):
            read(text)


def test_bad_bases_are_refused_before_anything_loads() -> None:
    with pytest.raises(UnknownName, match="snapkv"):
        POLICIES.parse("doubled:base=snapkw")
    with pytest.raises(UnknownName, match="window"):
        POLICIES.parse("doubled:base=(snapkv:windov=3)")
    for text in ("doubled:base=doubled", "doubled:base=(doubled:times=3)"):
        with pytest.raises(BadInput, match="wrap itself"):
            POLICIES.parse(text)
