"""How policies are drawn, as data, so that plotting needs no policy code."""

from __future__ import annotations

from typing import Any

from .policy import Policy
from .registry import spec_of


def style_of(policies: list[Policy]) -> dict[str, dict[str, Any]]:
    """How each policy is drawn, so that plotting needs no policy code."""
    return {
        spec_of(policy): {
            "color": policy.color,
            "dashed": any(need.is_attention for need in policy.needs),
            "bracket": policy.bracket,
            "source": policy.source,
        }
        for policy in policies
    }
