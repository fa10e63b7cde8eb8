"""What RULER's prompts are made of: noise, keys, values, words, essays."""

from __future__ import annotations

import json
import random
import re
import uuid
from pathlib import Path

from kvbench.errors import BadInput

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
LINE = " ".join(NOISE)
ADJECTIVES = (
    "amber ample ancient arctic autumn bitter bold brave breezy bright bronze calm careful cheerful civic "
    "clever cloudy coastal cobalt cold copper cosmic crisp curious daring dusty eager early easy elder even "
    "faint famous fancy fast fertile final fond formal fresh frosty gentle giant glad golden grand grave "
    "green happy hardy hidden hollow honest humble icy idle inland jolly keen kind large late lively lone "
    "loud loyal lucky mellow merry mighty misty modern narrow neat noble northern open pale patient plain "
    "polar proud quick quiet rapid rare remote round royal rustic scarlet secret sharp shiny silent silver "
    "simple sleepy smooth sober solar solid southern steady stout sunny swift tall tender tidy tiny urban "
    "vast velvet violet vivid warm wild windy wise witty woolen young zesty"
)
NOUNS = (
    "acorn anchor apple arrow badge bakery barrel basket beacon blanket bottle branch bridge bucket button "
    "cabin camera candle canyon carpet castle cedar chapel cherry circus clock cloud coffee compass cottage "
    "cradle crater curtain desert dolphin drawer eagle engine fabric falcon feather fiddle forest fossil "
    "fountain garden garlic glacier guitar hammer harbor helmet island jacket jungle kettle kitchen ladder "
    "lagoon lantern lemon library lizard magnet mango marble market meadow mirror monkey mountain museum "
    "needle oasis ocean orange orchard otter oyster paddle palace parade parrot pebble pencil pepper piano "
    "pillow planet pocket puddle rabbit radish ribbon river rocket saddle salmon school shadow shovel spider "
    "spoon stable station statue summit teapot temple thunder ticket tiger tower tractor tunnel turtle "
    "valley vessel village violin walnut whistle window winter yogurt zebra"
)


def compounds(draw: random.Random) -> list[str]:
    """All our adjective-noun pairs, shuffled: RULER's word keys look like this."""
    pairs = [f"{left}-{right}" for left in ADJECTIVES.split() for right in NOUNS.split()]
    draw.shuffle(pairs)
    return pairs


def number(draw: random.Random) -> str:
    return str(draw.randint(10**6, 10**7 - 1))


def uuid4(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def noise(words: int) -> list[str]:
    """RULER's noise lines; the last one may be shorter and end anywhere between two words."""
    line = LINE.split()
    lines = [LINE] * (words // len(line))
    rest = " ".join(line[: words % len(line)])
    return [*lines, rest] if rest else lines


def sentences(text: str) -> list[str]:
    """The text cut after each sentence's mark. (RULER asks nltk, which knows abbreviations.)"""
    return re.split(r"(?<=[.!?]) ", text)


def read_text(path: str) -> str:
    """The text of a .txt file, or the "text" column of a jsonl file, rows joined by an empty line.

    Raises BadInput for a file that is not there, not UTF-8, or empty.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise BadInput(
            f"text {path}: {reason}; give a UTF-8 .txt file, or .jsonl with a text column"
        ) from None
    if file.suffix == ".jsonl":
        text = "\n\n".join(
            _column(line, f"{path}, line {n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()
        )
    if not text.strip():
        raise BadInput(f"text {path}: the file has no text; give one with at least a few sentences")
    return text


def _column(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (json.JSONDecodeError, RecursionError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise BadInput(f"text {where}: no JSON object with a text column; repair it or give a .txt file")
    return text
