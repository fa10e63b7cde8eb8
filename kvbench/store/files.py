"""Names of files and folders."""

from __future__ import annotations

import re

from ..contract.identity import fingerprint

LONGEST_NAME = 150  # characters: file systems allow 255 bytes


def file_name(text: str) -> str:
    """A text as the name of a file or folder: everything unusual becomes an underscore."""
    name = re.sub(r"[^A-Za-z0-9._=,-]+", "_", text)
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{fingerprint(text)}"
