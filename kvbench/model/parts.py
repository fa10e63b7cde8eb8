"""Rotation and output projection of every layer, found by what they do, whatever the architecture calls them.

In: a loaded model. Out: `LayerParts`. One forward of two equal tokens, whose attention returns the same
numbers to both: all that differs between them is the rotation of their queries and keys. A module that makes
cosines and sines is a layer's rotation if undoing it makes the two alike, and a linear layer is its output
projection if it reads what attention returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..contract.layer_parts import LayerParts
from ..contract.output_projection import OutputProjection
from ..contract.rotary import Rotary
from ..errors import UnsupportedModel

SECOND = 13  # position of the second token; the first has 0
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative error of a rotation that is undone
ROUNDED = 3e-2  # the same in bfloat16 and float16
BY_LENGTH = ("longrope", "dynamic")  # rope types whose factors depend on the largest position


@dataclass
class _Trial:
    """A pass that notes what reaches and leaves attention. seen: layer -> queries, keys (1, head, 2, dim)."""

    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    modules: dict[int, Any] = field(default_factory=dict)
    rotaries: list[_RotaryCall] = field(default_factory=list)
    readers: list[tuple[Any, Tensor]] = field(default_factory=list)  # linear layers and their inputs

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        self.modules[module.layer_idx] = module
        self.seen[module.layer_idx] = query, key
        return drawn(query.shape[1], value.shape[-1], value).expand(-1, -1, 2, -1)


def drawn(heads: int, dim: int, like: Tensor) -> Tensor:
    """What attention returns to each of the two tokens: (1, head, 1, dim)."""
    draw = torch.Generator().manual_seed(heads * dim)
    return torch.randn(1, heads, 1, dim, generator=draw).to(like.device, like.dtype)


@dataclass(frozen=True, eq=False)
class _RotaryCall:
    """A module that makes cosines and sines of positions, and the arguments it was called with."""

    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def kind(self) -> tuple[object, ...]:
        """Calls of one kind give the same tables; some modules know several, by the type of a layer."""
        given = (*self.args, *self.kwargs.values())
        return (id(self.module), *(value for value in given if isinstance(value, str)))

    def paired_tables(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """`tables` for architectures that apply the first half of them to neighbours."""
        cos, sin = self.tables(start, stop)
        half = cos.shape[-1] // 2
        return cos[:, :half].repeat_interleave(2, -1), sin[:, :half].repeat_interleave(2, -1)

    def tables(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """cos, sin (position, rotated) float32 of positions start .. stop - 1.

        Raises UnsupportedModel for positions that the module would rotate by other factors than those before.
        """
        self._check(start, stop)

        def instead(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():  # tells the module a dtype and a device
                return torch.zeros(1, 1, 1, device=value.device)
            return torch.arange(start, stop, device=value.device)[None]

        kwargs = {name: instead(value) for name, value in self.kwargs.items()}
        cos, sin = self.module(*(instead(value) for value in self.args), **kwargs)
        return cos[0].float(), sin[0].float()

    def _check(self, start: int, stop: int) -> None:
        kinds = getattr(self.module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        rope = getattr(getattr(self.module, "config", None), "rope_parameters", None) or {}
        border = rope.get("original_max_position_embeddings", getattr(self.module, "original_max_seq_len", 0))
        if any(kind in BY_LENGTH for kind in kinds) and border and start < border < stop:
            raise UnsupportedModel(
                f"it looks at the rotation of positions {start} to {stop - 1}, and from {border} on the "
                "model rotates by other factors: use shorter or longer samples"
            )


@torch.no_grad()  # what is read outlives the pass
def read_parts(model: Any, layers: Sequence[int], device: Any, dtype: Any) -> dict[int, LayerParts]:
    """The parts of these layers; None for what is not found."""
    trial = _Trial()
    width = model.get_input_embeddings().weight.shape[1]
    token = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with _watched(model, trial):
        model.base_model(
            inputs_embeds=token.expand(-1, 2, -1),
            position_ids=torch.tensor([[0, SECOND]], device=device),
            use_cache=False,
            kv_pass=trial,
        )
    outputs = _find_outputs(trial)
    rotaries = _find_rotaries(trial, layers)
    return {layer: LayerParts(rotaries.get(layer), outputs.get(layer)) for layer in layers}


@contextmanager
def _watched(model: Any, trial: _Trial) -> Iterator[None]:
    def note_rotary(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else ()
        shapes = [part.shape for part in parts if isinstance(part, Tensor)]
        if len(shapes) == len(parts) == 2 and shapes[0] == shapes[1] and shapes[0][:-1] == (1, 2):
            trial.rotaries.append(_RotaryCall(module, args, dict(kwargs)))

    def note_reader(module: Any, args: Any) -> None:
        if args and isinstance(args[0], Tensor):
            trial.readers.append((module, args[0]))

    handles = []
    for module in model.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            handles.append(module.register_forward_hook(note_rotary, with_kwargs=True))
        if isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_pre_hook(note_reader))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _find_outputs(trial: _Trial) -> dict[int, OutputProjection]:
    """Layer -> the linear layer inside its attention that reads what attention returned, as it is."""
    found: dict[int, OutputProjection] = {}
    for layer, attention in trial.modules.items():
        heads = trial.seen[layer][0].shape[1]
        inside = set(attention.modules())
        for module, received in trial.readers:
            if module not in inside or received.shape[:-1] != (1, 2) or received.shape[-1] % heads:
                continue
            wanted = drawn(heads, received.shape[-1] // heads, received).flatten()
            weight = module.weight
            plain = weight.is_floating_point() and weight.shape[1:] == wanted.shape
            if plain and torch.equal(received[0], wanted.expand(2, -1)):
                found[layer] = OutputProjection(weight, heads)
    return found


def _find_rotaries(trial: _Trial, layers: Sequence[int]) -> dict[int, Rotary]:
    """Layer -> the rotation that turns its second token into its first."""
    calls = {call.kind: call for call in trial.rotaries}.values()
    found: dict[int, Rotary] = {}
    for layer in layers:
        dim = trial.seen[layer][1].shape[-1]
        tried = [Rotary(dim, None)]
        for call in calls:
            tried += [Rotary(dim, call.tables), Rotary(dim, call.tables, True)]
            tried += [Rotary(dim, call.paired_tables, True)]
        fitting = (rotary for rotary in tried if _undoes(rotary, trial.seen[layer]))
        if (rotary := next(fitting, None)) is not None:
            found[layer] = rotary
    return found


def _undoes(rotary: Rotary, states: tuple[Tensor, Tensor]) -> bool:
    """Whether both tokens have the same queries and keys before this rotation."""
    tables = rotary.read(0, SECOND + 1, states[0].device)
    if tables.rotated > rotary.dim or tables.rotated % 2:
        return False
    for state in states:
        first, second = tables.at(torch.tensor([0, SECOND])).unrotate(state).unbind(2)
        if not (first - second).norm() <= CLOSE.get(state.dtype, ROUNDED) * first.norm():
            return False
    return True
