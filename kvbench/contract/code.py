"""What code a policy or task is made of, so that numbers of an older version are not taken for its own."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions, version
from types import ModuleType
from typing import Any

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OURS = ("kvbench.policies.", "kvbench.tasks.")  # parts of kvbench that are plugins as others are


def code_of(cls: type) -> dict[str, str | None]:
    """Where a class comes from: module, distribution with its version, and a SHA-256 of the source.

    The source is that of its module, and of the modules of the same package that these take names from,
    without comments, docstrings and blank lines. What a function imports when it is called is not part of
    it. Of a class from a notebook or script it is the class. None where Python has no source.
    """
    top = cls.__module__.partition(".")[0]
    found = _distributions().get(top, ())
    distribution = f"{found[0]} {version(found[0])}" if found else None
    return {"module": cls.__module__, "distribution": distribution, "sha256": _digest(cls)}


def same_code(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two answers of `code_of` may be of one source; an unknown source may be any."""
    digests = one.get("sha256"), other.get("sha256")
    return None in digests or digests[0] == digests[1]


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Package -> distributions; looking through everything that is installed takes a while."""
    return packages_distributions()


def _digest(cls: type) -> str | None:
    try:
        if cls.__module__ == "__main__":
            texts = {"": inspect.getsource(cls)}
        else:
            texts = {module.__name__: inspect.getsource(module) for module in _modules(cls)}
    except (OSError, TypeError):
        return None
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{name}\0{statements(text)}\0".encode())
    return digest.hexdigest()


@functools.cache
def statements(source: str) -> str:
    """A source without comments, docstrings and blank lines; all of it where Python cannot read it.

    Text, not a syntax tree: how Python writes its trees changes with its version.
    """
    source = textwrap.dedent(source)
    lines = source.splitlines()
    try:
        nodes = list(ast.walk(ast.parse(source)))
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return source
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in nodes:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _modules(cls: type) -> list[ModuleType]:
    """The module of a class, those of its bases, and what these use of their own packages."""
    waiting = [base.__module__ for base in cls.__mro__]
    inside = _root(cls.__module__)
    found: dict[str, ModuleType] = {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is not None and name not in found and f"{name}.".startswith(inside):
            found[name] = module
            waiting += _names(module)
    return list(found.values())


def _root(name: str) -> str:
    """What a module's package begins with: "kvbench.policies.", or a plugin's own top package."""
    return next((part for part in OURS if name.startswith(part)), f"{name.partition('.')[0]}.")


def _names(module: ModuleType) -> Iterator[str]:
    """The modules that a module's names come from."""
    for value in list(vars(module).values()):
        name: Any = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name
