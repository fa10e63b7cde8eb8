"""The fields of a stored row with their types: what JSON may say, and what a table makes of it."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any

from ..contract.identity import REQUIRED, row_axes
from .row import Row

INT64 = range(-(2**63), 2**63)  # what a column of whole numbers can hold


def _is_whole(value: int) -> bool:
    return value in INT64


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and value in INT64)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(map(_is_number, values))


def _are_measured(values: Mapping[str, Any]) -> bool:
    kinds = set(map(type, values.values()))
    if not kinds <= {float, int, type(None)}:
        return False
    return int not in kinds or all(value in INT64 for value in values.values() if type(value) is int)


def _is_pair(values: Sequence[Any]) -> bool:
    return len(values) == 2 and all(type(value) is int for value in values)


def _json_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _pair_text(value: Sequence[int]) -> str:
    return ",".join(map(str, value))


@dataclass(frozen=True)
class Form:
    """How values of one kind look.

    types: those that JSON may give, exactly. dtype: of a table's column. check: what else must hold.
    show: what the column holds, where that is not the value itself.
    """

    types: frozenset[type]
    dtype: str = "object"  # for texts, too: the string type of pandas rejects lone surrogates
    check: Callable[[Any], bool] | None = None
    show: Callable[[Any], Any] | None = None


FORMS: dict[Any, Form] = {
    str: Form(frozenset({str})),
    int: Form(frozenset({int}), "Int64", _is_whole),
    float: Form(frozenset({int, float}), "float64", _is_number),
    Mapping: Form(frozenset({dict}), show=_json_text),
    Mapping[str, float]: Form(frozenset({dict}), check=_are_measured, show=_json_text),
    Sequence[float]: Form(frozenset({list}), check=_are_numbers, show=_json_text),
    tuple[int, int]: Form(frozenset({list}), check=_is_pair, show=_pair_text),
}


@dataclass(frozen=True)
class Column:
    """One field of a stored row, or one axis. default: where it is absent, REQUIRED where it must not be."""

    name: str
    form: Form
    default: Any
    is_axis: bool = False


def columns() -> list[Column]:
    """The fields of a stored row, each axis in the place of `settings`."""
    kinds = typing.get_type_hints(Row)
    found: list[Column] = []
    for one in fields(Row):
        if one.name == "settings":
            found += [_column(axis.name, axis.kind, axis.default, True) for axis in row_axes()]
        else:
            found.append(_column(one.name, kinds[one.name], _default(one)))
    return found


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return REQUIRED if one.default is MISSING else one.default


def _column(name: str, kind: Any, default: Any, is_axis: bool = False) -> Column:
    if not isinstance(kind, types.UnionType):
        return Column(name, FORMS[kind], default, is_axis)
    inner = FORMS[typing.get_args(kind)[0]]
    assert typing.get_args(kind)[1:] == (type(None),), kind
    form = replace(inner, types=inner.types | {type(None)})
    return Column(name, form, None if default is REQUIRED else default, is_axis)
