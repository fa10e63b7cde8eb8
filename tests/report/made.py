"""Runs to make pages of, and pages as a browser would see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from kvbench.store.results import Row, Store
from tests.store.synthetic import STYLE, TASKS, make_run, row

VOID = {"meta", "input", "br", "link", "img", "hr"}
FIXED = {"model": "smollm2-135m", "seed": 0, "dtype": "float32"}
HOSTILE = "knorm:note=</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"

__all__ = ["HOSTILE", "STYLE", "Element", "Seen", "make_rows", "make_run", "row", "seen"]


def make_rows(folder: Path, rows: list[Row], **sections: Any) -> Path:
    with Store.open(folder, FIXED, {"style": STYLE, "tasks": TASKS, **sections}) as store:
        store.append(rows)
    return folder


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    inside: tuple[str, ...]
    text: str = ""


@dataclass
class Seen(HTMLParser):
    """Every element of a page, in order. Raises: AssertionError where tags do not close."""

    elements: list[Element] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        element = Element(tag, {k: v or "" for k, v in attrs}, tuple(e.tag for e in self.open))
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def all(self, *tags: str) -> list[Element]:
        return [element for element in self.elements if element.tag in tags]

    def by_id(self, ident: str) -> Element:
        (found,) = (e for e in self.elements if e.attributes.get("id") == ident)
        return found


def seen(page: str) -> Seen:
    parser = Seen()
    parser.feed(page)
    parser.close()
    assert not parser.open, [element.tag for element in parser.open]
    return parser
