"""From JSON to rows: older schemas are brought up to date, and what is no row is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract.identity import REQUIRED
from ..errors import StoreError
from .columns import columns
from .row import SCHEMA, STATUSES, Row

# From the fields of schema N to those of N + 1, by N. A new field or axis that has a default needs none.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
NO_ROW = "not a kvbench row: move the line elsewhere and run again"


class RowReader:
    """Makes rows of what JSON says."""

    def __init__(self) -> None:
        self._columns = columns()
        self._known = {column.name for column in self._columns}
        self._axes = [(one.name, one.default) for one in self._columns if one.is_axis]
        self._fields = [(one.name, one.default) for one in self._columns if not one.is_axis]
        self._checks = [(one.name, one.form.check) for one in self._columns if one.form.check]
        self._accepted: set[tuple[Any, ...]] = set()  # names and types of rows that were good

    def read(self, stored: Any) -> Row:
        """One row. Raises: StoreError for what is not a row, or is one of a newer kvbench."""
        values = self._upgraded(stored)
        shape = (*values, *map(type, values.values()))
        if shape not in self._accepted:
            for column in self._columns:
                value = values.get(column.name, column.default)
                if type(value) not in column.form.types:
                    raise _no_row(column.name, value)
            self._accepted.add(shape)
        for name, check in self._checks:
            value = values.get(name)
            if value is not None and not check(value):
                raise _no_row(name, value)
        plain = {name: values.get(name, default) for name, default in self._fields}
        if plain["status"] not in STATUSES:
            raise StoreError(f"status {plain['status']!r}: must be one of {', '.join(STATUSES)}")
        return Row(settings={name: values.get(name, default) for name, default in self._axes}, **plain)

    def _upgraded(self, stored: Any) -> dict[str, Any]:
        """The fields of a row in today's schema."""
        if not isinstance(stored, dict) or not isinstance(stored.get("key"), str):
            raise StoreError("not a kvbench row (no key): move the line elsewhere and run again")
        schema = stored.get("schema")
        if type(schema) is not int or not 1 <= schema <= SCHEMA:
            raise StoreError(f"row schema {schema}, but this kvbench reads up to {SCHEMA}: upgrade kvbench")
        for older in range(schema, SCHEMA):
            stored = {**UPGRADES.get(older, dict)(stored), "schema": older + 1}
        if unknown := stored.keys() - self._known:
            names = ", ".join(sorted(unknown))
            raise StoreError(f"this kvbench does not know the fields {names}: upgrade kvbench")
        return stored


def _no_row(name: str, value: Any) -> StoreError:
    told = "missing" if value is REQUIRED else f"{value!r:.60}"
    return StoreError(f"{name} is {told}: {NO_ROW}")
