"""All that may follow the context, as one tree of tokens: shared beginnings are read once, in one pass.

In: ids of the question and of what may follow it. Out: nodes in reading order, and what each of them sees.
The trunk is the question. Reference, choices and a draft of the answer branch off where they first differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tree:
    """Tokens in the order in which they are read, parents before children.

    ids: token of each node. depth: its distance from the first token of the question. parent: the node
    before it, -1 for the first. root: the last token of the question, which predicts every first token.
    """

    ids: list[int]
    depth: list[int]
    parent: list[int]
    root: int
    children: list[dict[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, question: Sequence[int]) -> Tree:
        length = len(question)
        children: list[dict[int, int]] = [{} for _ in question]
        return cls(list(question), list(range(length)), list(range(-1, length - 1)), length - 1, children)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int]) -> list[int]:
        """Read these tokens after the question. Returns the nodes that predict them: root, then theirs."""
        node = self.root
        nodes = [node]
        for token in ids:
            after = self.children[node].get(token)
            if after is None:
                after = len(self.ids)
                self.children[node][token] = after
                self.children.append({})
                self.ids.append(token)
                self.depth.append(self.depth[node] + 1)
                self.parent.append(node)
            node = after
            nodes.append(node)
        return nodes

    @property
    def branches(self) -> bool:
        """Whether a node follows anything but the node before it."""
        return any(parent != node - 1 for node, parent in enumerate(self.parent))

    def visible(self, begin: int, end: int) -> Tensor | None:
        """What the nodes begin..end-1 see of the nodes 0..end-1: (end - begin, end) bool, themselves
        included; None where that is everything before them."""
        if not self.branches:
            return None
        seen = torch.zeros(end, end, dtype=torch.bool)
        for node, parent in enumerate(self.parent[:end]):
            if parent >= 0:
                seen[node] = seen[parent]
            seen[node, node] = True
        return seen[begin:]
