"""How a model turns queries and keys by their positions, and how that is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RotaryTables:
    """The rotation of some positions, in float32.

    cos, sin: (..., dim), the model's own, with its attention factor (YaRN, LongRoPE); 1 and 0 in dimensions
    that are not rotated. rotated: dimensions that are, the first ones. interleaved: pairs are neighbours, not
    halves. An average over positions is a linear map, too, which `rotate` applies.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rotated: int
    interleaved: bool = False

    def mean(self) -> RotaryTables:
        """The average rotation of all positions: cos, sin (dim,)."""
        return RotaryTables(self.cos.mean(0), self.sin.mean(0), self.rotated, self.interleaved)

    def at(self, positions: torch.Tensor) -> RotaryTables:
        """The rotation of each of these rows of the tables: cos, sin (*positions, dim)."""
        return RotaryTables(self.cos[positions], self.sin[positions], self.rotated, self.interleaved)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors (..., dim), as the model rotates them: float32."""
        x = x.float()
        return x * self.cos + self._turn(x) * self.sin

    def rotate_covariance(self, x: torch.Tensor) -> torch.Tensor:
        """R x R^T of symmetric matrices (..., dim, dim): float32."""
        return self.rotate(self.rotate(x).transpose(-1, -2))

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors (..., dim), as they were before the model rotated them: float32. Not for an average."""
        x = x.float()
        return (x * self.cos - self._turn(x) * self.sin) / (self.cos.square() + self.sin.square())

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Every pair (a, b) as (-b, a)."""
        part, rest = x[..., : self.rotated], x[..., self.rotated :]
        if self.interleaved:
            turned = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
        else:
            half = self.rotated // 2
            turned = torch.cat([-part[..., half:], part[..., :half]], -1)
        return torch.cat([turned, rest], -1)


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation of one layer. dim: head size. tables: (first, last + 1) -> cos, sin (position, rotated)
    float32; None for a layer without rotation."""

    dim: int
    tables: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]] | None
    interleaved: bool = False

    def read(self, start: int, stop: int, device: torch.device) -> RotaryTables:
        """The rotation of positions start .. stop - 1. Raises KvbenchError where the model has none there."""
        cos = torch.ones(stop - start, self.dim, device=device)
        sin = torch.zeros(stop - start, self.dim, device=device)
        rotated = 0
        if self.tables is not None:
            found = self.tables(start, stop)
            rotated = found[0].shape[-1]
            cos[:, :rotated], sin[:, :rotated] = found[0].to(device), found[1].to(device)
        return RotaryTables(cos, sin, rotated, self.interleaved)
