"""The scorer of KVP: one small MLP per KV head on (key, value, position), all heads in one matmul."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

from kvbench.errors import BadInput

PositionFeature = Literal["none", "raw", "normalised", "log", "sinusoidal"]
FREQUENCIES = 8  # sine and cosine pairs of the sinusoidal feature, wavelengths 2*pi ... 2*pi*10^4
SCALE = 4096.0  # positions per unit of the normalised feature


@dataclass(frozen=True)
class ScorerShape:
    """layers, kv_heads: agents are one per (full-attention layer, KV head). dim: of keys, and of values.
    hidden: width of the hidden layer. position: how the original position enters."""

    layers: int
    kv_heads: int
    dim: int
    hidden: int = 128
    position: PositionFeature = "log"

    def __post_init__(self) -> None:
        if self.position not in get_args(PositionFeature):
            raise BadInput(
                f"position feature '{self.position}': choose one of {', '.join(get_args(PositionFeature))}"
            )
        if min(self.layers, self.kv_heads, self.dim, self.hidden) < 1:
            raise BadInput(f"scorer {asdict(self)}: every size is 1 or more")

    @property
    def agents(self) -> int:
        return self.layers * self.kv_heads

    @property
    def inputs(self) -> int:
        extra = {"none": 0, "sinusoidal": 2 * FREQUENCIES}.get(self.position, 1)
        return 2 * self.dim + extra


def position_features(positions: torch.Tensor, kind: PositionFeature) -> torch.Tensor:
    """Original positions (...,) -> (..., features) float32. They never depend on what was evicted.

    raw: the index. normalised: index / 4096. log: log(1 + index). sinusoidal: 8 sine and cosine pairs.
    """
    p = positions.to(torch.float32)[..., None]
    if kind == "none":
        return p[..., :0]
    if kind == "sinusoidal":
        steps = torch.arange(FREQUENCIES, device=p.device) / (FREQUENCIES - 1)
        angles = p * torch.exp(-math.log(10_000.0) * steps)
        return torch.cat([angles.sin(), angles.cos()], -1)
    return {"raw": p, "normalised": p / SCALE, "log": torch.log1p(p)}[kind]


@dataclass
class ScorerWeights:
    """All agents' parameters, stacked. agent = full-layer index * kv_heads + KV head.

    mean, scale: (agent, inputs), standardise the inputs (statistics of the training traces).
    w1: (agent, inputs, hidden), b1: (agent, 1, hidden), w2: (agent, hidden, 1), b2: (agent, 1, 1).
    """

    mean: torch.Tensor
    scale: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor

    @classmethod
    def initial(cls, shape: ScorerShape, generator: torch.Generator) -> ScorerWeights:
        """Random first layer, zero last layer: at the start every token scores the same."""
        w1 = torch.randn(shape.agents, shape.inputs, shape.hidden, generator=generator)
        return cls(
            mean=torch.zeros(shape.agents, shape.inputs),
            scale=torch.ones(shape.agents, shape.inputs),
            w1=w1 / math.sqrt(shape.inputs),
            b1=torch.zeros(shape.agents, 1, shape.hidden),
            w2=torch.zeros(shape.agents, shape.hidden, 1),
            b2=torch.zeros(shape.agents, 1, 1),
        )

    @property
    def trained(self) -> list[torch.Tensor]:
        return [self.w1, self.b1, self.w2, self.b2]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def folded(self) -> ScorerWeights:
        """The same function with the standardisation folded into the first layer, for inference."""
        w1 = self.w1 * self.scale[..., None]
        b1 = self.b1 - torch.matmul((self.mean * self.scale)[:, None], self.w1)
        one, zero = torch.ones_like(self.scale), torch.zeros_like(self.mean)
        return ScorerWeights(zero, one, w1, b1, self.w2, self.b2)

    def agents_of(self, layer: int, kv_heads: int) -> ScorerWeights:
        """The agents of one layer."""
        return self.part(range(layer * kv_heads, (layer + 1) * kv_heads))

    def part(self, agents: range) -> ScorerWeights:
        """Some agents."""
        chosen = slice(agents.start, agents.stop)
        return ScorerWeights(**{name: tensor[chosen] for name, tensor in self.tensors().items()})

    @classmethod
    def joined(cls, parts: Sequence[ScorerWeights]) -> ScorerWeights:
        """All agents, from parts in their order."""
        tensors = [part.tensors() for part in parts]
        return cls(**{name: torch.cat([one[name] for one in tensors]) for name in tensors[0]})

    def copy(self) -> ScorerWeights:
        return ScorerWeights(**{name: tensor.clone() for name, tensor in self.tensors().items()})

    def to(self, device: Any) -> ScorerWeights:
        return ScorerWeights(**{name: tensor.to(device) for name, tensor in self.tensors().items()})


def scores(weights: ScorerWeights, inputs: torch.Tensor) -> torch.Tensor:
    """MLP scores. inputs: (..., agent, token, inputs) float32. Returns (..., agent, token) float32."""
    standard = (inputs - weights.mean[:, None]) * weights.scale[:, None]
    hidden = torch.nn.functional.gelu(torch.matmul(standard, weights.w1) + weights.b1)
    return (torch.matmul(hidden, weights.w2) + weights.b2)[..., 0]


def fast_scores(
    weights: ScorerWeights, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Scores from folded weights: the inputs are never joined, and one hidden layer is written in place.

    keys, values: (batch, agent, token, dim); positions: (batch, agent, token, features). Returns
    (batch, agent, token) float32.
    """
    batch, agents, tokens, dim = keys.shape
    shared = batch == 1
    w1, b1, w2, b2 = weights.trained if shared else (part.repeat(batch, 1, 1) for part in weights.trained)
    parts = [part.flatten(0, 1) for part in (keys.float(), values.float(), positions)]
    hidden = torch.baddbmm(b1, parts[0], w1[:, :dim])
    hidden.baddbmm_(parts[1], w1[:, dim : 2 * dim])
    if positions.shape[-1] == 1:
        hidden.addcmul_(parts[2], w1[:, 2 * dim :])
    elif positions.shape[-1]:
        hidden.baddbmm_(parts[2], w1[:, 2 * dim :])
    hidden = torch.nn.functional.gelu(hidden).mul_(w2.transpose(1, 2))
    return (hidden.sum(-1) + b2[..., 0]).view(batch, agents, tokens)
