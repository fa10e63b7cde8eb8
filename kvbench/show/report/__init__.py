"""`kvbench report`: one HTML page that says what stored rows show, and can be read anywhere.

Nothing is run or loaded from elsewhere: no torch here, and no request from the page.
"""

from .page import report

__all__ = ["report"]
