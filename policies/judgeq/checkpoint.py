"""Files of JudgeQ: trained soft tokens with their card."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvbench.contract.policy import TrainedFor
from kvbench.contract.seen_text import SeenText
from kvbench.contract.weights import file_state, save_tensors, seen_tensors, split_seen
from kvbench.errors import BadInput

CARD, FITS = "card", "trained_for"


@dataclass(frozen=True, eq=False)
class SoftTokens:
    """embeddings: (n, d_model) float32. trained_for: the model they fit. card: how they were made.

    seen: the text they were trained on.
    """

    embeddings: torch.Tensor
    trained_for: TrainedFor
    card: dict[str, Any]
    seen: SeenText | None = None

    @property
    def identity(self) -> str:
        """Of the numbers and the model: equal tokens may lie in unequal files."""
        digest = hashlib.sha256(repr(self.trained_for).encode() + self.embeddings.numpy().tobytes())
        return digest.hexdigest()[:16]


def write_tokens(path: Path, tokens: SoftTokens) -> None:
    """Store soft tokens, float32, with their card as metadata."""
    text, told = seen_tensors(tokens.seen)
    metadata = {CARD: json.dumps(tokens.card), FITS: json.dumps(vars(tokens.trained_for)), **told}
    embeddings = tokens.embeddings.detach().cpu().float().contiguous()
    save_tensors(path, {"embeddings": embeddings, **text}, metadata)


def load(path: Path) -> SoftTokens:
    """Soft tokens of a file, read once, and again when it has changed.

    Raises BadInput for a file that is not ours.
    """
    return _read(path, file_state(path))


@lru_cache(maxsize=32)
def _read(path: Path, state: tuple[int, ...]) -> SoftTokens:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            card, fits = json.loads(metadata[CARD]), TrainedFor(**json.loads(metadata[FITS]))
            tensors, seen = split_seen({name: file.get_tensor(name) for name in file.keys()}, metadata)  # noqa: SIM118
        embeddings = tensors["embeddings"].float()
        if embeddings.dim() != 2 or not embeddings.isfinite().all():
            raise ValueError("its embeddings are not a finite table")
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise BadInput(f"{path} is not a file of JudgeQ's soft tokens ({error}): train again") from error
    return SoftTokens(embeddings, fits, card, seen)
