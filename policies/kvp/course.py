"""Which trace and which future every training step sees, with the utilities computed in advance.

Every step takes one trace and one split point n, and treats the tokens after n as the future (reference:
arXiv:2602.10238, section 3.2). The pairs are drawn from the seed before training, so the utilities of
all splits of a trace come from one pass over it, and resuming needs no generator state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.contract.pins import Pins
from kvbench.learn.trace import TraceSet, utilities
from kvbench.learn.training import Split, draw_visits, held_out

from .recipe import KVPRecipe
from .scorer import PositionFeature, position_features


@dataclass
class Example:
    """Tokens before one split of one trace. keys, values: (agent, n, dim); utility: (agent, n)."""

    keys: Tensor
    values: Tensor
    utility: Tensor
    positions: Tensor

    def inputs(self, position: PositionFeature) -> Tensor:
        """(agent, token, inputs) float32."""
        features = position_features(self.positions, position).expand(self.keys.shape[0], -1, -1)
        return torch.cat([self.keys.float(), self.values.float(), features], -1)


@dataclass
class Curriculum:
    """Which trace and split each step uses, with the utilities already computed.

    visits: per step (trace, split). utility: the same keys -> (agent, n) float32.
    """

    traces: TraceSet
    visits: list[tuple[int, int]]
    utility: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _memory: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def draw(cls, traces: TraceSet, chosen: list[int], count: int, split: Split, seed: int) -> Curriculum:
        """`count` visits over the chosen traces, each trace as often as the others (+-1)."""
        return cls(traces, draw_visits(traces, chosen, count, split, seed))

    def prepare(self, layers: range, advance: Callable[[str], None] = lambda text: None) -> None:
        """Compute the utility of every visit, one pass per trace, and keep keys and values in memory.

        layers: of the traces; agents are those of these layers only.
        """
        for trace in sorted({trace for trace, _ in self.visits}):
            splits = sorted({n for t, n in self.visits if t == trace})
            found: list[list[Tensor]] = [[] for _ in splits]
            keys, values = [], []
            for layer in layers:
                q, k, v = self.traces[trace].layer(layer)
                for i, u in enumerate(utilities(q, k, self.traces.infos[trace].scaling, splits)):
                    found[i].append(u)
                keys.append(k)
                values.append(v)
            self._memory[trace] = (torch.cat(keys), torch.cat(values))
            self.utility.update({(trace, n): torch.cat(u) for n, u in zip(splits, found, strict=True)})
            advance("utilities")

    def example(self, step: int, pins: Pins) -> Example:
        """The tokens that compete in this step: those before the split that are not pinned."""
        trace, n = self.visits[step]
        keys, values = self._memory[trace]
        first, stop = (pins.first, n - pins.last) if n > pins.total + 1 else (0, n)
        part = slice(first, stop)
        utility = self.utility[trace, n][:, part]
        return Example(keys[:, part], values[:, part], utility, torch.arange(first, stop))


@dataclass
class TrainingSet:
    """A recipe's course and its exam on held-out traces, with utilities computed for some layers."""

    course: Curriculum
    exam: Curriculum
    layers: range

    @property
    def agents(self) -> range:
        """The agents of these layers among all."""
        heads = self.course.traces.kv_heads
        return range(self.layers.start * heads, self.layers.stop * heads)

    @classmethod
    def prepare(
        cls,
        config: KVPRecipe,
        traces: TraceSet,
        layers: range | None = None,
        advance: Callable[[str], None] = lambda text: None,
    ) -> TrainingSet:
        """Draw and compute what the recipe's steps need; layers: None is all of the traces.

        Visits do not depend on the layers. Raises BadInput for too few traces.
        """
        layers = range(traces.layers) if layers is None else layers
        learned, kept = held_out(traces, config.validation)
        course = Curriculum.draw(traces, learned, config.steps, config.split, config.seed)
        exam = Curriculum.draw(traces, kept, 2 * len(kept), "mix", config.seed + 1)
        course.prepare(layers, advance)
        exam.prepare(layers, advance)
        return cls(course, exam, layers)
