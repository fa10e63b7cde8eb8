"""What a check says: of a policy (`kvbench check`), or of a run folder (`kvbench verify`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One law and what came of it. detail: the first case that breaks it, or a remark, in words."""

    law: str
    passed: bool
    detail: str = ""
