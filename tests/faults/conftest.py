"""A tiny model folder and the laws' toys, for runs that go wrong."""

from __future__ import annotations

from tests.laws.conftest import folder, toys

__all__ = ["folder", "toys"]
