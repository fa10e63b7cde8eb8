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
        self.known: set[str] = set()
        self.plan: list[tuple[str, Any, bool, frozenset[type], Callable[[Any], bool] | None]] = []
        for column in columns():
            self.known.add(column.name)
            form = column.form
            self.plan.append((column.name, column.default, column.is_axis, form.types, form.check))

    def read(self, stored: Any) -> Row:
        """One row. Raises: StoreError for what is not a row, or is one of a newer kvbench."""
        values = self._upgraded(stored)
        plain: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for name, default, is_axis, allowed, check in self.plan:
            value = values.get(name, default)
            if type(value) not in allowed or (check and value is not None and not check(value)):
                told = "missing" if value is REQUIRED else f"{value!r:.60}"
                raise StoreError(f"{name} is {told}: {NO_ROW}")
            (settings if is_axis else plain)[name] = value
        if plain["status"] not in STATUSES:
            raise StoreError(f"status {plain['status']!r}: must be one of {', '.join(STATUSES)}")
        return Row(settings=settings, **plain)

    def _upgraded(self, stored: Any) -> dict[str, Any]:
        """The fields of a row in today's schema."""
        if not isinstance(stored, dict) or not isinstance(stored.get("key"), str):
            raise StoreError("not a kvbench row (no key): move the line elsewhere and run again")
        schema = stored.get("schema")
        if type(schema) is not int or not 1 <= schema <= SCHEMA:
            raise StoreError(f"row schema {schema}, but this kvbench reads up to {SCHEMA}: upgrade kvbench")
        for older in range(schema, SCHEMA):
            stored = {**UPGRADES.get(older, dict)(stored), "schema": older + 1}
        if unknown := stored.keys() - self.known:
            names = ", ".join(sorted(unknown))
            raise StoreError(f"this kvbench does not know the fields {names}: upgrade kvbench")
        return stored
