"""Numbers belong to the code that made them: a policy that was edited has no old rows taken for its own."""

from __future__ import annotations

import importlib
import json
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.audit.verify import verify
from kvbench.contract.code import code_of, statements
from kvbench.contract.registry import POLICIES, TASKS
from kvbench.errors import StoreError
from kvbench.store.results import REPLACED
from tests.laws.runs import by_key, config, lines, recorded

POLICY = """
from __future__ import annotations
from dataclasses import dataclass
from kvbench import Need, Policy, register
from edited_plugin.helper import power

@register("edited", source="tests")
@dataclass(frozen=True)
class Edited(Policy):
    needs = frozenset({Need.VALUES})

    def score(self, seen):
        return seen.values.float().norm(dim=-1) ** power()
"""
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toys: None) -> Iterator[Write]:
    """Write a file of the plugin `edited_plugin`, and import the plugin anew."""
    package = tmp_path / "plugin" / "edited_plugin"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "edited_plugin"]:
            del sys.modules[name]

    def put(name: str, text: str) -> None:
        (package / name).write_text(text)
        forget()
        linecache.clearcache()
        importlib.invalidate_caches()
        if (package / "policy.py").is_file():
            importlib.import_module("edited_plugin.policy")

    put("helper.py", "def power():\n    return 1.0\n")
    put("policy.py", POLICY)
    yield put
    forget()


def settings(folder: str, out: Path, **changes: Any) -> kvbench.RunConfig:
    given: dict[str, Any] = {"policies": ("edited", "knorm"), "tasks": "laws_toy", "budgets": (8,)}
    return config(folder, out, **(given | changes))


def test_a_policy_that_was_edited_is_refused_or_computed_again(
    folder: str, tmp_path: Path, write: Write
) -> None:
    out = tmp_path / "run"
    first, _ = recorded(settings(folder, out))
    assert (first.computed, first.reused) == (12, 0)
    same, forwards = recorded(settings(folder, out))
    assert (same.computed, same.reused, forwards) == (0, 12, [])
    old = by_key(lines(out))
    write("policy.py", POLICY.replace("** power()", "** -power()"))
    (told,) = [one for one in verify([str(out)], [], True) if "policy edited has the code" in one.law]
    assert not told.passed
    with pytest.raises(StoreError, match=r"policy edited has changed.*--fresh edited.*another --out"):
        kvbench.run(settings(folder, out), progress=False)
    assert by_key(lines(out)) == old
    again, _ = recorded(settings(folder, out, fresh="edited"))
    assert (again.computed, again.reused) == (4, 8)
    assert "4 rows of edited were moved" in " ".join(again.notes)
    new = by_key(lines(out))
    assert new.keys() == old.keys()
    changed = {key for key in old if new[key]["metrics"] != old[key]["metrics"]}
    assert changed
    assert {new[key]["policy"] for key in changed} == {"edited"}
    replaced = [json.loads(line) for line in (out / REPLACED).read_text().splitlines()]
    assert [row["key"] for row in replaced] == [
        row["key"] for row in old.values() if row["policy"] == "edited"
    ]
    after, _ = recorded(settings(folder, out))
    assert (after.computed, after.reused) == (0, 12)


def test_what_a_policy_imports_from_its_package_counts(folder: str, tmp_path: Path, write: Write) -> None:
    recorded(settings(folder, tmp_path / "run"))
    before = code_of(POLICIES.get("edited"))
    write("helper.py", "def power():\n    return 2.0\n")
    assert code_of(POLICIES.get("edited"))["sha256"] != before["sha256"]
    with pytest.raises(StoreError, match="policy edited has changed"):
        kvbench.run(settings(folder, tmp_path / "run"), progress=False)


def test_another_policys_change_is_none_of_ours(folder: str, tmp_path: Path, write: Write) -> None:
    recorded(settings(folder, tmp_path / "run", policies="knorm"))
    write("policy.py", POLICY.replace("** power()", "** -power()"))
    found, _ = recorded(settings(folder, tmp_path / "run", policies="knorm"))
    assert found.computed == 0


def test_code_says_module_and_distribution() -> None:
    code = code_of(POLICIES.get("kvp"))
    assert code["module"] == "kvbench.policies.kvp.policy"
    assert str(code["distribution"]).startswith("kvbench ")
    names = [POLICIES.get(name) for name in POLICIES.names()] + [TASKS.get(name) for name in TASKS.names()]
    assert len({code_of(cls)["sha256"] for cls in names}) > 10
    assert code_of(type("Nowhere", (), {"__module__": "__main__"}))["sha256"] is None


def test_what_changes_no_number_is_no_change() -> None:
    source = """
'''Module.'''

class A:
    '''Doc.'''

    x = "# no comment"  # one

    def f(self):
        '''Doc
        of two lines.'''
        return 1
"""
    plain = 'class A:\n    x = "# no comment"\n    def f(self):\n        return 1'
    assert statements(source) == plain
    assert statements(plain) == plain
    assert statements(plain.replace("return 1", "return 2")) != plain
    assert statements(plain.replace("# no", "# a")) != plain
    assert statements("not python (") == "not python ("
    assert statements("    x = 1  # indented\n") == "x = 1"
