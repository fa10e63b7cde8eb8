"""Two ways to fit scores to hidden states, for all layers at once: least squares, and a small MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .recipe import KVzapRecipe


class Fit(Protocol):
    """add: hidden states, per layer (row, d_model), and targets (layer, kv_head, row). finish: tensors as
    `policy.PARTS`, with a layer axis."""

    def add(self, hidden: list[Tensor], wanted: Tensor) -> None: ...
    def finish(self, report: Callable[[str], None]) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class Linear:
    """Ridge regression from sums that grow with each context: memory does not depend on how many there are.

    The bias is not shrunk: rows are centred by their means.
    """

    def __init__(self, recipe: KVzapRecipe) -> None:
        self._ridge = recipe.ridge
        self._rows = 0
        self._sums: list[Tensor] = []

    def add(self, hidden: list[Tensor], wanted: Tensor) -> None:
        x = torch.stack(hidden).double()
        y = wanted.double().transpose(1, 2)  # (layer, row, kv_head)
        found = [x.sum(1), y.sum(1), x.mT @ x, x.mT @ y]
        self._sums = [a + b for a, b in zip(self._sums, found, strict=True)] if self._sums else found
        self._rows += x.shape[1]

    def finish(self, report: Callable[[str], None]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, y, xx, xy = (part / self._rows for part in self._sums)
        xx = xx - x[:, :, None] * x[:, None, :] + self._ridge / self._rows * torch.eye(x.shape[1]).double()
        outer = torch.linalg.solve(xx, xy - x[:, :, None] * y[:, None, :]).mT  # (layer, kv_head, d_model)
        bias = y - (outer @ x[..., None])[..., 0]
        layers, _, width = outer.shape
        return torch.zeros(layers, 0, width), torch.zeros(layers, 0), outer.float(), bias.float()


class MLP:
    """One hidden layer, AdamW with a cosine schedule, squared error; inputs are held in float16."""

    def __init__(self, recipe: KVzapRecipe) -> None:
        self._recipe = recipe
        self._hidden: list[Tensor] = []
        self._wanted: list[Tensor] = []

    def add(self, hidden: list[Tensor], wanted: Tensor) -> None:
        self._hidden.append(torch.stack(hidden).half())
        self._wanted.append(wanted.transpose(1, 2))

    def finish(self, report: Callable[[str], None]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, y = torch.cat(self._hidden, 1), torch.cat(self._wanted, 1)  # (layer, row, ...)
        recipe, (layers, rows, width) = self._recipe, x.shape
        draw = torch.Generator().manual_seed(recipe.seed)
        inner = torch.randn(layers, recipe.hidden, width, generator=draw) / width**0.5
        outer = torch.randn(layers, y.shape[2], recipe.hidden, generator=draw) / recipe.hidden**0.5
        parts = [inner, torch.zeros(layers, recipe.hidden), outer, y.mean(1).clone()]
        for part in parts:
            part.requires_grad_()
        optimiser = torch.optim.AdamW(parts, lr=recipe.lr)
        steps = recipe.epochs * -(-rows // recipe.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for epoch in range(recipe.epochs):
            total = 0.0
            for at in torch.randperm(rows, generator=draw).split(recipe.batch):
                given, wanted = x[:, at].float(), y[:, at]
                middle = torch.nn.functional.gelu(given @ parts[0].mT + parts[1][:, None])
                loss = (middle @ parts[2].mT + parts[3][:, None] - wanted).square().mean((1, 2)).sum()
                optimiser.zero_grad()
                loss.backward()
                clip_each_layer(parts, 1.0)
                optimiser.step()
                schedule.step()
                total += loss.item() / layers * len(at)
            report(f"epoch {epoch + 1}/{recipe.epochs}: mean squared error {total / rows:.3f}")
        done = [part.detach() for part in parts]
        return done[0], done[1], done[2], done[3]


def clip_each_layer(parts: list[Tensor], limit: float) -> None:
    """Scale each layer's gradient to a norm of at most `limit`: layers learn apart."""
    grads = [part.grad for part in parts if part.grad is not None]
    norm = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
    for grad in grads:
        grad.mul_((limit / norm.clamp_min(1e-12)).clamp(max=1).view(-1, *[1] * (grad.dim() - 1)))
