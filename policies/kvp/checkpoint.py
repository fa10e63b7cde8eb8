"""Files of KVP: trained weights with their card, and training state. Safetensors only, never pickle."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvbench.errors import BadInput

from .scorer import ScorerShape, ScorerWeights

CARD, SHAPE = "card", "shape"


def write_weights(path: Path, weights: ScorerWeights, shape: ScorerShape, card: dict[str, Any]) -> None:
    """Store weights (float16 where that is exact enough: the matrices) with their card as metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.half() if name in ("w1", "w2") else tensor).contiguous()
        for name, tensor in weights.tensors().items()
    }
    _replace(path, tensors, {CARD: json.dumps(card), SHAPE: json.dumps(asdict(shape))})


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


def save(
    path: Path, parameters: list[Tensor], optimiser: torch.optim.Optimizer, config: dict[str, Any], step: int
) -> None:
    """Training state after `step` steps. config: whatever decides the weights."""
    tensors: dict[str, Tensor] = {}
    for i, parameter in enumerate(parameters):
        state = optimiser.state[parameter]
        tensors |= {
            f"{i}.value": parameter.detach(),
            f"{i}.m": state["exp_avg"],
            f"{i}.v": state["exp_avg_sq"],
        }
        tensors[f"{i}.t"] = torch.as_tensor(state["step"]).clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, tensors, {"step": str(step), "config": json.dumps(config, sort_keys=True)})


def restore(
    path: Path, parameters: list[Tensor], optimiser: torch.optim.Optimizer, config: dict[str, Any]
) -> int:
    """Put a saved state back and return its number of steps; 0 where there is none.

    Raises BadInput when it belongs to another configuration or is broken.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("config") != json.dumps(config, sort_keys=True):
                raise BadInput(
                    f"{path} is the state of another recipe or other traces: use another --out or delete it"
                )
            for i, parameter in enumerate(parameters):
                parameter.data.copy_(file.get_tensor(f"{i}.value"))
                optimiser.state[parameter] = {
                    "step": file.get_tensor(f"{i}.t"),
                    "exp_avg": file.get_tensor(f"{i}.m"),
                    "exp_avg_sq": file.get_tensor(f"{i}.v"),
                }
            return int(metadata["step"])
    except (SafetensorError, KeyError, OSError) as error:
        raise BadInput(f"{path} is broken ({error}): delete it and train from the start") from error


def _replace(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    draft = path.with_name(path.name + ".tmp")
    save_file(tensors, draft, metadata=metadata)
    os.replace(draft, path)
