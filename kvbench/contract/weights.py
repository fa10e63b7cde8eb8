"""Files of policies that learn: weights and the state of a training. Safetensors only, never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import BadInput
from .files import replace_file
from .seen_text import SeenText

SUFFIX = ".safetensors"


def find_weights(policy: str, shipped: Path, asked: str) -> Path:
    """The file of `policy:weights=ASKED`: a name in the folder of shipped weights, or a path.

    Raises BadInput for what is neither.
    """
    path = shipped / (asked + SUFFIX)
    if Path(asked).name != asked or not path.is_file():  # asked in every layer: no listing here
        path = Path(asked).expanduser()
    if not path.is_file():
        names = sorted(file.name.removesuffix(SUFFIX) for file in shipped.glob("*" + SUFFIX))
        raise BadInput(
            f"{policy}:weights={asked}: neither a file nor one of the shipped weights "
            f"({', '.join(names) or 'none'}); train some with kvbench train --policy {policy}"
        )
    return path


def file_state(path: Path) -> tuple[int, ...]:
    """What differs once a file has changed."""
    state = path.stat()
    return state.st_ino, state.st_mtime_ns, state.st_size


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a file of tensors as a whole: whoever reads finds the old one or the new one."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda draft: save_file(tensors, draft, metadata=metadata))


SEEN = "seen_text"  # the tensor and the key of the metadata


def seen_tensors(seen: SeenText | None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What a weights file holds of the text its weights have seen: (tensors, metadata)."""
    if seen is None:
        return {}, {}
    return {SEEN: torch.from_numpy(seen.hashes.view("int32").copy())}, {SEEN: str(seen.every)}


def split_seen(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> tuple[dict[str, torch.Tensor], SeenText | None]:
    """(the other tensors of a weights file, the text that its weights have seen if the file says it)."""
    rest = {name: tensor for name, tensor in tensors.items() if name != SEEN}
    if SEEN not in tensors:
        return rest, None
    return rest, SeenText(tensors[SEEN].numpy().view("uint32"), int(metadata[SEEN]))


def save_state(
    path: Path, parameters: list[torch.Tensor], optimiser: torch.optim.Optimizer, config: dict[str, Any],
    step: int, notes: Any = None,
) -> None:  # fmt: skip
    """Training state after `step` steps of Adam.

    config: whatever decides the weights. notes: anything JSON holds; `restore_state` gives it back.
    """
    tensors: dict[str, torch.Tensor] = {}
    for i, parameter in enumerate(parameters):
        state = optimiser.state[parameter]
        tensors |= {
            f"{i}.value": parameter.detach(),
            f"{i}.m": state["exp_avg"],
            f"{i}.v": state["exp_avg_sq"],
        }
        tensors[f"{i}.t"] = torch.as_tensor(state["step"]).clone()
    written = {"config": json.dumps(config, sort_keys=True), "notes": json.dumps(notes)}
    save_tensors(path, tensors, {"step": str(step), **written})


def restore_state(
    path: Path, parameters: list[torch.Tensor], optimiser: torch.optim.Optimizer, config: dict[str, Any]
) -> tuple[int, Any]:
    """Put a saved state back and return its number of steps and its notes; 0 and None where there is none.

    Raises BadInput when it belongs to another configuration or is broken.
    """
    if not path.exists():
        return 0, None
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
                    "exp_avg": file.get_tensor(f"{i}.m").to(parameter.device),
                    "exp_avg_sq": file.get_tensor(f"{i}.v").to(parameter.device),
                }
            return int(metadata["step"]), json.loads(metadata.get("notes", "null"))
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise BadInput(f"{path} is broken ({error}): delete it and train from the start") from error
