"""Every measured number in the documents comes from committed results: this script writes the tables.

    python -m docs.numbers            # rewrite the marked blocks of all documents (`make docs`)
    python -m docs.numbers --check    # fail where a block is not what the results give

A document marks a block with one line of HTML comment, which names a function of docs/blocks.py and its
arguments; the lines up to the end mark are the script's:

    <!-- numbers: means needle-1024 string_match 64,128 -->
    | policy | 64 | 128 |
    ...
    <!-- end -->

Prose may repeat a number, but not bring one: `unsourced` finds measured numbers that neither a block of the
same section nor a document linked in the same paragraph has.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCED = ("README.md", "results/FINDINGS.md", "results/FIGURES.md", "docs/learned.md", "docs/speed.md")
BLOCK = re.compile(r"(<!-- numbers: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# What counts as measured: a decimal, a percentage, or a count with a unit. Budgets, lengths, sample counts
# and model sizes are settings; they stand in commands and captions.
MEASURED = re.compile(
    r"(?<![\w.-])(\d+\.\d+|\d+(?= ?%| percent| times\b| (?:s|minutes?|hours?|GiB|MiB|nats)\b))"
)
SETTINGS = re.compile(
    r"`[^`]*`|arXiv:[\d.]+|Python \d\.\d+|95% [a-z ]*(?:bootstrap|interval)|Apache-2\.0|Qwen2\.5-\w+"
)


def documents() -> list[Path]:
    """Every Markdown file of the project."""
    folders = (ROOT, ROOT / "docs", ROOT / "results", ROOT / "tests")
    return sorted(file for folder in folders for file in folder.glob("*.md"))


def renewed(text: str) -> str:
    """A document with each marked block as the results give it now."""
    from docs.blocks import block

    return BLOCK.sub(lambda match: match[1] + block(match[2]) + "\n" + match[4], text)


def sections(text: str) -> list[str]:
    """A document cut before each heading."""
    hidden = FENCED.sub(lambda match: re.sub(r"^#", " ", match[0], flags=re.MULTILINE), text)
    starts = [0, *(match.start() for match in re.finditer(r"^#+ ", hidden, re.MULTILINE)), len(text)]
    return [text[start:end] for start, end in pairwise(starts)]


def unsourced(text: str, folder: Path) -> list[str]:
    """Measured numbers of the prose that no block of their section, and no document linked beside them, has.

    folder: where the document lies, for its relative links. Signs do not matter, and a thousands
    separator is not known.
    """
    missing = []
    for section in sections(text):
        known = numbers("".join(match[3] for match in BLOCK.finditer(section)))
        prose = FENCED.sub("", BLOCK.sub("", section))
        for paragraph in re.split(r"\n\s*\n|\n(?=[*-] |\| )", prose):
            told = LINK.sub(lambda match: match[0][: match[0].rindex("](") + 1], SETTINGS.sub("", paragraph))
            found = [match[1] for match in MEASURED.finditer(told)]
            if set(found) - known:
                found = [number for number in found if number not in known | cited(paragraph, folder)]
                missing += [f"{number}: {' '.join(paragraph.split())[:100]}" for number in found]
    return missing


def cited(paragraph: str, folder: Path) -> set[str]:
    """The numbers of the text documents that a paragraph links to."""
    targets = [target.partition("#")[0] for target in LINK.findall(paragraph)]
    files = [folder / target for target in targets if target.endswith((".md", ".txt", ".csv"))]
    return {
        number for file in files if file.is_file() for number in numbers(file.read_text(encoding="utf-8"))
    }


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", text))


def main() -> int:
    stale = []
    for file in documents():
        text = file.read_text(encoding="utf-8")
        new = renewed(text)
        if new != text:
            stale.append(str(file.relative_to(ROOT)))
            if "--check" not in sys.argv[1:]:
                file.write_text(new, encoding="utf-8")
    if "--check" in sys.argv[1:] and stale:
        print(f"not what the results give, run `make docs`: {', '.join(stale)}", file=sys.stderr)
        return 1
    print("\n".join(f"rewritten: {name}" for name in stale) or "every block is what the results give")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
