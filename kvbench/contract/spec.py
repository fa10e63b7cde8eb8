"""Specs on the command line: `snapkv:window=64,kernel=7` and back.

A spec is a name, then after a colon the parameters that differ from their defaults. Parameters are
the fields of the dataclass behind the name, and values are read as the fields' types. A parameter that
must be given may be written first and without its name: `lm_eval:gsm8k,context=question`. A value that has
commas or parameters of its own stands in brackets: `chunk_kv:base=(snapkv:window=32,kernel=5)`.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from typing import Any, Literal

from ..errors import BadInput, PluginError, UnknownName

FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


NONE = "none"


FIRST = ""  # the name of a value written without one


@dataclass(frozen=True)
class Parameter:
    """One parameter of a policy or task. source: where the default comes from.

    type: the annotation. default: dataclasses.MISSING where a value must be given.
    """

    name: str
    type: Any
    default: Any
    source: str

    @property
    def type_name(self) -> str:
        return getattr(self.type, "__name__", "") if isinstance(self.type, type) else str(self.type)


def parameters(cls: type) -> list[Parameter]:
    """The parameters of a policy or task class, in the order of its fields.

    Raises: PluginError when an annotation cannot be resolved.
    """
    if not is_dataclass(cls):
        return []
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError) as error:
        raise PluginError(f"{cls.__module__}:{cls.__qualname__}: cannot read its fields: {error}") from error
    shown = [field for field in fields(cls) if field.init]
    return [
        Parameter(field.name, hints[field.name], _default(field), field.metadata.get("source", ""))
        for field in shown
    ]


def split_specs(given: Iterable[str] | str) -> list[str]:
    """Separate comma-joined specs; commas inside parameters do not separate.

    A piece with "=" before any ":" continues the spec on its left:
    "snapkv:window=64,kernel=7,tova" gives ["snapkv:window=64,kernel=7", "tova"].
    Raises: BadInput for a parameter that no spec is open for.
    """
    specs: list[str] = []
    for text in [given] if isinstance(given, str) else given:
        start = len(specs)
        for piece in filter(None, (part.strip() for part in _pieces(text))):
            if "=" not in piece.split(":", 1)[0]:
                specs.append(piece)
            elif len(specs) > start and ":" in specs[-1]:
                specs[-1] += "," + piece
            else:
                before = specs[-1] if len(specs) > start else "NAME"
                raise BadInput(f"'{piece}' in '{text}' belongs to no name: write {before}:{piece}")
    return specs


def split_name(text: str) -> tuple[str, dict[str, str]]:
    """One spec's name and its parameters as written; FIRST names one written without. Raises: BadInput."""
    name, colon, rest = text.strip().partition(":")
    values: dict[str, str] = {}
    for index, piece in enumerate(_pieces(rest) if colon else []):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if index == 0 and key and not equals:
            key, value = FIRST, key
        elif not (key and equals and value):
            raise BadInput(f"'{piece}' in '{text}': write parameters as {name}:NAME=VALUE,NAME=VALUE")
        if key in values:
            raise BadInput(f"'{text}' gives {key} twice: keep one of them")
        values[key] = _bare(value)
    return name, values


def _pieces(text: str) -> list[str]:
    """A text cut at the commas that stand in no brackets. Raises: BadInput for a bracket without its pair."""
    pieces, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and not depth:
            pieces.append(text[start:index])
            start = index + 1
    if depth:
        raise BadInput(f"'{text}': a bracket has no pair; write NAME=(VALUE,VALUE)")
    return [*pieces, text[start:]]


def _bare(value: str) -> str:
    """A value without the brackets around it, where one pair is around all of it."""
    if not (value.startswith("(") and value.endswith(")")):
        return value
    inside, depth = value[1:-1], 0
    for letter in inside:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            return value
    return inside


def build(cls: type, values: dict[str, str], asked: str) -> Any:
    """An instance of `cls` from parameters as written. asked: "policy 'snapkv'", for messages.

    Raises: UnknownName for a parameter that is not there; BadInput for a value that does not fit.
    """
    known = {parameter.name: parameter for parameter in parameters(cls)}
    values = _named(values, known, asked)
    ready = {}
    for key, text in values.items():
        if key not in known:
            raise UnknownName("parameter", key, known, f"Asked of {asked}.")
        ready[key] = _convert(text, known[key], asked)
    missing = [p.name for p in known.values() if p.default is MISSING and p.name not in ready]
    if missing:
        raise BadInput(f"{asked} needs a value for {', '.join(missing)}: write it after ':' as NAME=VALUE")
    try:
        return cls(**ready)
    except (TypeError, ValueError) as error:
        if getattr(cls, "__abstractmethods__", None):
            raise PluginError(f"{asked} is not complete: {error}") from error
        raise BadInput(f"{asked} refused its parameters: {error}") from error


def _named(values: dict[str, str], known: dict[str, Parameter], asked: str) -> dict[str, str]:
    """The values with a name for the one written without: the first parameter that must be given."""
    if FIRST not in values:
        return values
    needed = next((p.name for p in known.values() if p.default is MISSING), None)
    if needed is None or needed in values:
        raise BadInput(f"'{values[FIRST]}' has no name: write parameters of {asked} as NAME=VALUE,NAME=VALUE")
    return {needed if key == FIRST else key: value for key, value in values.items()}


def parse_template_args(given: Iterable[str]) -> dict[str, Any]:
    """The values of "KEY=VALUE" texts: true, false, none, numbers, else text. Raises: BadInput."""
    values: dict[str, Any] = {}
    for text in given:
        if not isinstance(text, str):
            raise BadInput(f"--template-arg {text!r}: write KEY=VALUE, as text")
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (equals and name.isidentifier() and value) or name in values:
            raise BadInput(f"--template-arg '{text}': write KEY=VALUE, each key once")
        if value.lower() in ("none", "null"):
            values[name] = None
            continue
        try:
            read = json.loads(value.lower())
        except ValueError:
            read = value
        values[name] = read if isinstance(read, bool | int | float) else value
    return values


def spec_of(instance: Any) -> str:
    """The canonical spec of a policy or task: only parameters that differ from their defaults."""
    pairs = []
    for parameter in parameters(type(instance)):
        value = getattr(instance, parameter.name)
        if parameter.default is MISSING or value != parameter.default:
            pairs.append(f"{parameter.name}={_written(value)}")
    return instance.name + (":" + ",".join(pairs) if pairs else "")


def _written(value: Any) -> str:
    if value is None:
        return NONE
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"({text})" if "," in text or "=" in text else text


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _convert(text: str, parameter: Parameter, asked: str) -> Any:
    kinds = _alternatives(parameter.type)
    if type(None) in kinds and text.lower() == NONE:
        return None
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            for value in typing.get_args(kind):
                if text == _written(value):
                    return value
        elif kind in _READERS:
            try:
                return _READERS[kind](text)
            except (ValueError, KeyError):
                continue
        elif kind is not type(None):
            raise PluginError(f"{asked}: parameter {parameter.name} has type {parameter.type_name}, "
                              "which cannot be given as text")  # fmt: skip
    wanted = " or ".join(_expected(kind) for kind in kinds)
    raise BadInput(f"{asked}: {parameter.name}={text} is not {wanted}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return typing.get_args(kind)
    return (kind,)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_READERS: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: FLAGS[text.lower()],
    int: int,
    float: _finite,
    str: str,
}


def _expected(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(_written(value) for value in typing.get_args(kind))
    words = {bool: "true or false", int: "a whole number (int)", float: "a finite number (float)"}
    return words.get(kind, NONE if kind is type(None) else "a text (str)")


def parameters_of(instance: Any) -> dict[str, Any]:
    """The parameters of a policy or task, defaults included."""
    return asdict(instance) if is_dataclass(instance) and not isinstance(instance, type) else {}
