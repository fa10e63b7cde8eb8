"""Whether the model and data hub can be asked."""

from __future__ import annotations

import os
import re
import socket


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
