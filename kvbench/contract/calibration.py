"""What was measured on a model's traces and is stored for a policy: tensors, the model they fit, a card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import BadInput
from .policy import TrainedFor
from .seen_text import SeenText
from .weights import file_state, save_tensors, seen_tensors, split_seen

CARD, FITS = "card", "trained_for"


@dataclass(frozen=True, eq=False)
class Calibration:
    """tensors: by name, float32. trained_for: the model they fit. card: how they were made. seen: the text
    they were measured on."""

    tensors: Mapping[str, torch.Tensor]
    trained_for: TrainedFor
    card: Mapping[str, Any]
    seen: SeenText | None = None

    @property
    def identity(self) -> str:
        """Of the numbers and the model: equal numbers may lie in unequal files."""
        digest = hashlib.sha256(repr(self.trained_for).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()[:16]


def write_calibration(path: Path, made: Calibration) -> None:
    """Store the tensors with their card as metadata."""
    text, told = seen_tensors(made.seen)
    metadata = {CARD: json.dumps(dict(made.card)), FITS: json.dumps(vars(made.trained_for)), **told}
    plain = {name: tensor.detach().cpu().float().contiguous() for name, tensor in made.tensors.items()}
    save_tensors(path, plain | text, metadata)


def load_calibration(path: Path, policy: str, names: Collection[str]) -> Calibration:
    """The numbers of a file, read once, and again when it has changed.

    policy, names: whose file it must be, and which tensors it must hold. Raises: BadInput for another.
    """
    return _read(path, policy, frozenset(names), file_state(path))


@lru_cache(maxsize=32)
def _read(path: Path, policy: str, names: frozenset[str], state: tuple[int, ...]) -> Calibration:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            card, fits = json.loads(metadata[CARD]), TrainedFor(**json.loads(metadata[FITS]))
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors, seen = split_seen(stored, metadata)
        if card["policy"] != policy or set(tensors) != names:
            raise ValueError(f"it holds {', '.join(sorted(tensors)) or 'nothing'} of {card['policy']}")
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError("not all of its numbers are finite")
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise BadInput(f"{path} is not a file of {policy} ({error}): train again") from error
    return Calibration({name: tensor.float() for name, tensor in tensors.items()}, fits, card, seen)
