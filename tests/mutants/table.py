"""All mutations, in the order of the laws."""

from __future__ import annotations

from . import attention, keeping, sharing, storing
from .mutation import Mutation


def by_law(mutation: Mutation) -> tuple[bool, int, str]:
    number = mutation.law.isdigit()
    return not number, int(mutation.law) if number else 0, mutation.law


MUTATIONS = sorted(
    [*attention.MUTATIONS, *keeping.MUTATIONS, *sharing.MUTATIONS, *storing.MUTATIONS], key=by_law
)
