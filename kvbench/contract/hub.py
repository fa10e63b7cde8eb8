"""Whether the model and data hub can be asked."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path


def hub_reachable() -> bool:
    """Whether the hub may be asked (HF_HUB_OFFLINE is not set) and answers within a second."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return False
    host = re.sub(r"^https?://|[:/].*$", "", constants.ENDPOINT)
    try:
        socket.create_connection((host, 443), timeout=1).close()
    except OSError:
        return False
    return True


def may_be_cached(dataset: str) -> bool:
    """Whether a folder of the hub's caches is named like a data set: a look that needs no `datasets`.

    False is certain; what a folder really holds only `datasets` can tell.
    """
    from huggingface_hub import constants

    prepared = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    caches = [Path(folder).expanduser() for folder in (prepared, constants.HF_HUB_CACHE)]
    wanted = _letters(dataset.rsplit("/", 1)[-1])
    return any(
        wanted in _letters(entry.name) for cache in caches if cache.is_dir() for entry in cache.iterdir()
    )


def _letters(name: str) -> str:
    """Caches write names in several ways: BoolQ, bool_q."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
