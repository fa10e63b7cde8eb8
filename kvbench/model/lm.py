"""A model ready to run, with its provenance, and what policies are told of it.

In: what `open.py` has loaded. Out: a description for `Policy.bind`, bound policies, attention modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..contract.layer_parts import LayerParts
from ..contract.model_description import ModelDescription
from ..contract.policy import Policy
from .geometry import Geometry
from .rotation import Rotation


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run, with its provenance.

    revision: commit of the hub or version of the package, None for a folder. sha256: see
    `fingerprint_folder`. eos_ids: tokens that end an answer.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    sha256: str
    device: Any
    dtype: Any
    geometry: Geometry
    eos_ids: frozenset[int]
    _bound: dict[tuple[Policy, str], Policy] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def description(self) -> ModelDescription:
        """What a policy is told. A layer lies where the first weight of its parts lies."""
        geometry = self.geometry
        places: dict[int, Any] = {}
        for module in self.model.modules():
            index, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
            if isinstance(index, int) and weight is not None:
                places.setdefault(index, weight.device)
        return ModelDescription(
            name=self.name,
            layers=geometry.layers,
            evicted_layers=geometry.full_layers,
            query_heads=geometry.query_heads,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            width=self.model.get_input_embeddings().weight.shape[1],
            devices=tuple(places.get(layer, self.device) for layer in geometry.full_layers),
            device=self.device,
            dtype=self.dtype,
        )

    @cached_property
    def attention_modules(self) -> dict[int, Any]:
        """Layer index -> the module whose attention comes through our hook."""
        from .hook import find_attention

        return find_attention(self.model, self.device, self.dtype)

    @cached_property
    def rotation(self) -> Rotation:
        """How positions become rotations; chosen once for a sample (see `Rotation.whole`)."""
        return Rotation(self.model, self.geometry.rotation_border)

    @cached_property
    def parts(self) -> dict[int, LayerParts]:
        """Rotation and output projection of every full-attention layer. Not while the model reads."""
        from .parts import read_parts

        return read_parts(self.model, self.geometry.full_layers, self.device, self.dtype)

    def bind(self, policy: Policy) -> Policy:
        """A policy ready for this model: bound once, and again when what it learned has changed."""
        name = (policy, policy.identity)
        if name in self._bound:
            return self._bound[name]
        bound = policy.bind(self.description)
        if bound is not policy:
            self._bound[name] = bound
        return bound
