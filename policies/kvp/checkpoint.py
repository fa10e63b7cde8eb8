"""Files of KVP: trained weights with their card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvbench.contract.seen_text import SeenText
from kvbench.contract.weights import save_tensors, seen_tensors, split_seen
from kvbench.errors import BadInput

from .scorer import ScorerShape, ScorerWeights

CARD, SHAPE = "card", "shape"


def write_weights(
    path: Path,
    weights: ScorerWeights,
    shape: ScorerShape,
    card: dict[str, Any],
    seen: SeenText | None = None,
) -> None:
    """Store weights (float16 where that is exact enough: the matrices) with their card as metadata.

    seen: the text they have seen.
    """
    text, told = seen_tensors(seen)
    tensors = {
        name: (tensor.half() if name in ("w1", "w2") else tensor).contiguous()
        for name, tensor in weights.tensors().items()
    }
    save_tensors(path, tensors | text, {CARD: json.dumps(card), SHAPE: json.dumps(asdict(shape)), **told})


def read_weights(path: Path) -> tuple[ScorerWeights, ScorerShape, dict[str, Any], SeenText | None]:
    """Weights, shape, card and the text that the weights have seen.

    Raises BadInput for a file that is not ours or whose shapes disagree.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            card, shape = json.loads(metadata[CARD]), ScorerShape(**json.loads(metadata[SHAPE]))
            if "model_sha256" not in card:
                raise KeyError("its card names no model")
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors, seen = split_seen(stored, metadata)
        weights = ScorerWeights(**{name: tensor.float() for name, tensor in tensors.items()})
    except FileNotFoundError:
        raise BadInput(f"no KVP weights at {path}: train some with kvbench train --policy kvp") from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise BadInput(f"{path} is not a file of KVP weights ({error}): train again") from error
    expected = ScorerWeights.initial(shape, torch.Generator()).tensors()
    wrong = [name for name, tensor in weights.tensors().items() if tensor.shape != expected[name].shape]
    if wrong:
        raise BadInput(f"{path}: {', '.join(wrong)} do not have the shape its card says: train again")
    return weights, shape, card, seen
