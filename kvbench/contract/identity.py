"""What a row belongs to: a hash of everything that changes its numbers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# What a row's configuration consists of. The last three are not in the row but in the manifest.
IDENTITY = (
    "policy", "params", "budget", "pins", "schedule", "chunk", "weights", "task", "task_params", "model",
    "question", "template", "seed",
)  # fmt: skip


IN_MANIFEST = ("data_sha256", "model_sha256", "dtype")


def fingerprint(value: Any) -> str:
    """16 hex digits of the SHA-256 of a JSON-able value; equal values give equal digits."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
