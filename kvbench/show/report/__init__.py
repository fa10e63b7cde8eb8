"""`kvbench report`: one HTML page that says what stored rows show, and can be read anywhere.

In: run folders. Out: a page. May import: contract, stats, store and show; what draws is imported on use.
Nothing is run or loaded from elsewhere: no torch here, and no request from the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def report(paths: str | Path | Iterable[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of one or more run folders; returns the file.

    out: the file, else report.html in the first run folder. Equal rows and manifests give equal bytes.
    Raises: StoreError when there is nothing to show or no place for the page; as `read_rows`.
    """
    from .page import write_page

    return write_page([Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths], out)
