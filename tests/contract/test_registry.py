"""Names and specs: found once, suggested when wrong, never silently replaced."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal

import pytest

from kvbench.contract import registry
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import (
    POLICIES,
    TASKS,
    Registry,
    expand_policies,
    parameters,
    register,
    spec_of,
    split_specs,
)
from kvbench.errors import BadInput, PluginError, UnknownName


@dataclass(frozen=True)
class Many(Policy):
    """One parameter of each type."""

    whole: int = param(3, "table 1")
    real: float = param(0.5, "section 2")
    flag: bool = param(False, "ours")
    text: str | None = param(None, "ours")
    mode: Literal["avg", "max"] = param("avg", "ours")

    def score(self, seen: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry without built-ins, in which `register` writes."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    empty = Registry("policy", "kvbench.policies", Policy)
    monkeypatch.setattr(registry, "POLICIES", empty)
    register("many", source="a paper")(Many)
    return empty


def _policy(qualname: str, module: str = "somewhere") -> type[Policy]:
    return type(
        qualname, (Policy,), {"__module__": module, "__qualname__": qualname, "score": lambda *_: None}
    )


def test_built_ins_enter_through_entry_points() -> None:
    assert {"snapkv", "tova", "oracle", "random"} <= set(POLICIES.names())
    assert "boolq" in TASKS.names()
    assert POLICIES.target("snapkv") == "kvbench.policies.snapkv:SnapKV"
    assert POLICIES.get("snapkv").name == "snapkv"


def test_listing_names_loads_neither_torch_nor_a_policy() -> None:
    program = (
        "import sys; from kvbench.contract.registry import POLICIES, TASKS; "
        "POLICIES.names(); TASKS.target('boolq');"
        "print(sorted({'torch', 'kvbench.policies.snapkv', 'kvbench.tasks.boolq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize(
    ("given", "specs"),
    [
        ("snapkv:window=64,kernel=7,tova", ["snapkv:window=64,kernel=7", "tova"]),
        ("knorm,tova", ["knorm", "tova"]),
        (["a:x=1", "b,c:y=2,z=3"], ["a:x=1", "b", "c:y=2,z=3"]),
        ("ruler/qa_1:length=512,ruler/vt", ["ruler/qa_1:length=512", "ruler/vt"]),
        ("a:file=c:/x,other=d:/y,b", ["a:file=c:/x,other=d:/y", "b"]),
        (" a , ,b,", ["a", "b"]),
        ("", []),
    ],
)
def test_commas_separate_specs_but_not_parameters(given: Any, specs: list[str]) -> None:
    assert split_specs(given) == specs


@pytest.mark.parametrize("given", ["kernel=7", "snapkv,kernel=7", ["snapkv:window=64", "kernel=7"]])
def test_a_parameter_without_its_spec_is_refused(given: Any) -> None:
    with pytest.raises(BadInput, match="kernel=7"):
        split_specs(given)


def test_values_take_the_type_of_their_field(policies: Registry) -> None:
    assert policies.parse("many:whole=4,real=2,flag=yes,text=a b,mode=max") == Many(
        4, 2.0, True, "a b", "max"
    )
    assert policies.parse("many:text=none") == Many()
    assert policies.parse("many") == Many()


def test_canonical_specs_name_only_what_differs_and_parse_back(policies: Registry) -> None:
    assert spec_of(Many()) == "many"
    for made in (Many(4), Many(flag=True, text="x"), Many(real=1e-7, mode="max"), Many(whole=-1)):
        assert policies.parse(spec_of(made)) == made
    assert spec_of(Many(whole=3, flag=True)) == "many:flag=true"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("many:whole=2.5", ["whole=2.5", "int"]),
        ("many:whole=none", ["whole=none", "int"]),
        ("many:real=nan", ["real=nan", "float"]),
        ("many:flag=2", ["flag=2", "true or false"]),
        ("many:mode=min", ["mode=min", "avg, max"]),
        ("many:whole", ["NAME=VALUE"]),
        ("many:", ["NAME=VALUE"]),
        ("many:whole=1,whole=2", ["whole twice"]),
    ],
)
def test_a_bad_value_is_refused_with_parameter_value_and_type(
    policies: Registry, spec: str, words: list[str]
) -> None:
    with pytest.raises(BadInput) as caught:
        policies.parse(spec)
    for word in words:
        assert word in str(caught.value)


def test_unknown_names_and_parameters_suggest(policies: Registry) -> None:
    with pytest.raises(UnknownName, match=r"'mani'.*Did you mean 'many'"):
        policies.parse("mani")
    with pytest.raises(UnknownName, match=r"parameter 'hole'.*Did you mean 'whole'.*policy 'many'"):
        policies.parse("many:hole=1")
    with pytest.raises(UnknownName, match="always evaluated"):
        policies.parse("full")


def test_parameters_state_type_default_and_source() -> None:
    first, *_, last = parameters(Many)
    assert (first.name, first.type_name, first.default, first.source) == ("whole", "int", 3, "table 1")
    assert last.name == "mode"


def test_two_classes_cannot_share_a_name(policies: Registry) -> None:
    with pytest.raises(PluginError) as caught:
        register("many", source="another paper")(_policy("Other"))
    assert f"{Many.__module__}:Many" in str(caught.value)
    assert "somewhere:Other" in str(caught.value)
    assert policies.get("many") is Many


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize("name", ["full", "all", "", "a b", "a:b", "a,b", "a=b"])
def test_names_that_specs_cannot_carry_are_refused(name: str) -> None:
    with pytest.raises(PluginError, match="name"):
        register(name, source="x")(_policy("Named"))


def test_a_notebook_cell_that_runs_again_replaces_its_class(policies: Registry) -> None:
    first, second = _policy("Cell", "__main__"), _policy("Cell", "__main__")
    register("cell", source="x")(first)
    register("cell", source="x")(second)
    assert policies.get("cell") is second
    with pytest.raises(PluginError, match="twice"):
        register("cell", source="x")(_policy("OtherCell", "__main__"))


@pytest.mark.usefixtures("policies")
def test_only_policies_register_as_policies() -> None:
    with pytest.raises(PluginError, match="extend Policy"):
        register("number", source="x")(int)


def _discovering(monkeypatch: pytest.MonkeyPatch, *targets: tuple[str, str]) -> Registry:
    entries = [EntryPoint(name, target, "kvbench.policies") for name, target in targets]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    return Registry("policy", "kvbench.policies", Policy)


def test_the_decorator_of_an_entry_points_class_is_no_collision(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _discovering(monkeypatch, ("many", f"{Many.__module__}:Many"))
    found.add("many", Many)
    assert found.get("many") is Many
    assert found.names() == ["many"]


def test_one_name_twice_is_a_collision_even_in_one_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _discovering(monkeypatch, ("a", "one:A"), ("a", "two:B"))
    with pytest.raises(PluginError, match=r"one:A.*two:B"):
        found.names()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("module_that_is_missing:A", "cannot be imported: ModuleNotFoundError"),
        ("kvbench.contract.policy:Nothing", "cannot be imported: AttributeError"),
        ("kvbench.contract.policy:Pins", "extends Policy"),
        ("kvbench.contract.policy:Policy", "decorate it with 'plugin'"),
    ],
)
def test_a_broken_plugin_is_listed_and_raises_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, target: str, reason: str
) -> None:
    found = _discovering(monkeypatch, ("plugin", target))
    assert found.names() == ["plugin"]
    assert reason in found.failures()["plugin"]
    for _ in range(2):
        with pytest.raises(PluginError, match="plugin") as caught:
            found.get("plugin")
        assert reason in str(caught.value)


def test_all_stands_for_every_policy_once_and_never_for_full() -> None:
    names = POLICIES.names()
    assert expand_policies(["full", "all", "tova"]) == names
    assert expand_policies(["tova", "all"]) == ["tova", *(name for name in names if name != "tova")]
    assert expand_policies(["tova:x=1", "tova:x=1"]) == ["tova:x=1"]
