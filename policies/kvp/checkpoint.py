"""Files of KVP: trained weights with their card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvbench.contract.weights import save_tensors
from kvbench.errors import BadInput

from .scorer import ScorerShape, ScorerWeights

CARD, SHAPE = "card", "shape"


def write_weights(path: Path, weights: ScorerWeights, shape: ScorerShape, card: dict[str, Any]) -> None:
    """Store weights (float16 where that is exact enough: the matrices) with their card as metadata."""
    tensors = {
        name: (tensor.half() if name in ("w1", "w2") else tensor).contiguous()
        for name, tensor in weights.tensors().items()
    }
    save_tensors(path, tensors, {CARD: json.dumps(card), SHAPE: json.dumps(asdict(shape))})


def read_weights(path: Path) -> tuple[ScorerWeights, ScorerShape, dict[str, Any]]:
    """Weights, shape and card. Raises BadInput for a file that is not ours or whose shapes disagree."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            card, shape = json.loads(metadata[CARD]), ScorerShape(**json.loads(metadata[SHAPE]))
            if "model_sha256" not in card:
                raise KeyError("its card names no model")
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        weights = ScorerWeights(**tensors)
    except FileNotFoundError:
        raise BadInput(f"no KVP weights at {path}: train some with kvbench train --policy kvp") from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise BadInput(f"{path} is not a file of KVP weights ({error}): train again") from error
    expected = ScorerWeights.initial(shape, torch.Generator()).tensors()
    wrong = [name for name, tensor in weights.tensors().items() if tensor.shape != expected[name].shape]
    if wrong:
        raise BadInput(f"{path}: {', '.join(wrong)} do not have the shape its card says: train again")
    return weights, shape, card
