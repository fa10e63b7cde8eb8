"""Dialogues of OpenAssistant: paths through trees of messages.

One message of its flat rows, shortened; a tree of them is one prompt and all that followed:

    {"message_id": "e0cf", "parent_id": null, "message_tree_id": "e0cf", "role": "prompter", "rank": null,
     "deleted": false, "lang": "en", "text": "What do you think about ChatGPT?"}

The quirk that matters: siblings are alternative replies, so a dialogue is one path through a tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.contract.data import Dataset

OASST = Dataset(
    hub="OpenAssistant/oasst2",
    config=None,
    split="validation",
    folder=None,
    columns=("message_id", "parent_id", "message_tree_id", "role", "text", "rank", "deleted", "lang"),
)
ROLES = {"prompter": "user", "assistant": "assistant"}
Turn = dict[str, str]


@dataclass(frozen=True)
class Dialogue:
    """The best-ranked path of one tree, from a user's turn to a model's turn."""

    tree: str
    turns: list[Turn]

    @property
    def exchanges(self) -> list[list[Turn]]:
        """Pairs of a user's turn and the model's answer."""
        return [self.turns[i : i + 2] for i in range(0, len(self.turns), 2)]


def half(tree: str) -> str:
    """ "train" or "heldout", for a tree's id."""
    return "heldout" if hashlib.sha256(tree.encode()).digest()[-1] % 2 else "train"


def dialogues(messages: Sequence[dict[str, Any]], language: str | None = None) -> list[Dialogue]:
    """The best-ranked path of every tree with at least one answer, in the order of their roots."""
    children: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        children.setdefault(message["parent_id"], []).append(message)
    found = []
    for root in children.get(None, []):  # type: ignore[call-overload]
        if language is not None and root["lang"] != language:
            continue
        turns = list(_path(root, children))
        turns = turns[: len(turns) // 2 * 2]
        if turns:
            found.append(Dialogue(root["message_tree_id"], turns))
    return found


def _path(root: dict[str, Any], children: dict[str, list[dict[str, Any]]]) -> Iterator[Turn]:
    """Turns from the root on, while they alternate between user and model."""
    message: dict[str, Any] | None = root if not root["deleted"] else None
    expected = "prompter"
    while message is not None and message["role"] == expected and message["text"].strip():
        yield {"role": ROLES[expected], "content": message["text"]}
        expected = "assistant" if expected == "prompter" else "prompter"
        replies = [reply for reply in children.get(message["message_id"], []) if not reply["deleted"]]
        message = min(replies, key=_rank, default=None)


def _rank(message: dict[str, Any]) -> float:
    rank = message["rank"]
    return float(rank) if rank is not None and rank == rank else float("inf")
