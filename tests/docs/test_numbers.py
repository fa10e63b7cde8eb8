"""Documents say what the committed results say, link to what is there, and do not grow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.blocks import KINDS, block
from docs.numbers import BLOCK, FENCED, LINK, ROOT, SOURCED, documents, renewed, unsourced

MARKED = [file for file in documents() if BLOCK.search(file.read_text(encoding="utf-8"))]


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", MARKED, ids=named)
def test_every_block_is_what_the_results_give(file: Path) -> None:
    """`make docs` rewrites them."""
    for mark, line, body, end in BLOCK.findall(file.read_text(encoding="utf-8")):
        assert body == block(line) + "\n", line
        assert len(body.splitlines()) > 2, f"{mark}: a table without a line {end}"


@pytest.mark.parametrize("name", SOURCED)
def test_measured_numbers_in_prose_stand_in_a_table_or_are_cited(name: str) -> None:
    file = ROOT / name
    assert unsourced(file.read_text(encoding="utf-8"), file.parent) == []


def test_a_number_without_source_is_found(tmp_path: Path) -> None:
    text = "# One\n<!-- numbers: heads -->\n| a | 0.25 |\n<!-- end -->\nIt is 0.25.\n"
    text += "# Two\nIt is 0.25, and 7% at 64.\n"
    assert [line.split(":")[0] for line in unsourced(text, tmp_path)] == ["0.25", "7"]
    (tmp_path / "there.md").write_text("7 and 0.25")
    assert unsourced(text.replace("and 7%", "and 7% ([there](there.md#x))"), tmp_path) == []
    assert unsourced("`0.5`, arXiv:2602.10238, Python 3.11, 95% bootstrap, 1024 pairs\n", tmp_path) == []


def test_a_stale_block_is_rewritten() -> None:
    text = "before\n<!-- numbers: study base -->\n| old |\n<!-- end -->\nafter\n"
    new = renewed(text)
    assert "| old |" not in new
    assert new.startswith("before\n<!-- numbers: study base -->\n| variant |")
    assert new.endswith("<!-- end -->\nafter\n")
    assert renewed(new) == new


def test_every_kind_of_block_is_used() -> None:
    used = {line.split()[0] for file in MARKED for _, line, _, _ in BLOCK.findall(file.read_text("utf-8"))}
    assert used == set(KINDS)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


@pytest.mark.parametrize("file", documents(), ids=named)
def test_every_relative_link_leads_somewhere(file: Path) -> None:
    text = FENCED.sub("", file.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    """What GitHub makes of headings: lower case, hyphens for spaces, no punctuation."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
