"""Recorded tokens, ranked: what policies would keep at a split point of a trace, and what the future says.

No model is called, but for policies that read extra tokens: the traces' model reads those, and nothing
else, after the recorded keys and values. Who looks at rotations or the output projection finds that model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract.draws import draw_key
from ..contract.layer_parts import FROM_PARTS, LayerParts
from ..contract.model_description import ModelDescription
from ..contract.need import Need
from ..contract.observation import Observation, ProbeLayer
from ..contract.pins import Pins, parse_pins
from ..contract.policy import Policy, TrainedFor
from ..contract.registry import POLICIES, expand_policies, spec_of
from ..contract.shared_work import SharedWork
from ..engine.attention import Layer
from ..engine.bind import bind_policy, check_parts, check_room, validated_probe
from ..engine.cache import Cache
from ..engine.order import rank
from ..engine.probe import read_probe
from ..engine.score import validated_score
from ..errors import BadInput, PluginError
from ..model.open import LoadedModel, OpenModel, open_model
from ..study.plan import check_trained
from .trace import Trace, TraceSet, utilities

if TYPE_CHECKING:
    from ..model.open import LoadedModel
    from .trace import Trace


NOT_RECORDED = frozenset({Need.QUESTION, Need.SECOND_PASS})


@dataclass(frozen=True)
class SplitRanking:
    """One trace at one split point n: the tokens before n, and the future from n on.

    orders: {spec: slots (layer, kv_head, n) int64, the one to keep longest first}. utility: the future
    attention of each slot, (layer, kv_head, n) float32. failures: {spec: why}, of policies that gave no order
    for this trace.
    """

    split: int
    orders: dict[str, Tensor]
    utility: Tensor
    failures: Mapping[str, str]


@dataclass(frozen=True)
class RecordedRanker:
    """Ranks traces with policies, bound to them. pins: none, native, or FIRST,LAST. lm: the traces' model,
    where a policy needs it. left_out: what "all" brought and traces cannot rank, and why."""

    traces: TraceSet
    policies: list[Policy]
    pins: str
    seed: int
    lm: LoadedModel | None
    left_out: tuple[str, ...] = ()

    @classmethod
    def open(
        cls, traces: TraceSet, specs: Iterable[str], pins: str = "none", seed: int = 0
    ) -> RecordedRanker:
        """Raises: KvbenchError for unknown names, bad pins, and policies that do not fit the traces."""
        parse_pins(pins)
        policies, left_out = policies_for(traces, specs)
        return cls.of(traces, policies, pins, seed, tuple(left_out))

    @classmethod
    def of(
        cls, traces: TraceSet, policies: list[Policy], pins: str = "none", seed: int = 0,
        left_out: tuple[str, ...] = (),
    ) -> RecordedRanker:  # fmt: skip
        """With policies that fit the traces."""
        needs_model = any(policy.needs & (FROM_PARTS | {Need.PROBE}) for policy in policies)
        lm = open_recorder(traces, "cpu", traces.header["model_dtype"]).load() if needs_model else None
        for policy in policies:
            if lm is not None:
                check_parts(lm, policy)
        bound = [bind_policy(_describe(traces), policy) for policy in policies]
        return cls(traces, bound, pins, seed, lm, left_out)

    @property
    def specs(self) -> list[str]:
        return [spec_of(policy) for policy in self.policies]

    def pins_of(self, policy: Policy) -> Pins:
        asked = parse_pins(self.pins)
        return policy.pins if asked is None else asked

    @torch.no_grad()
    def rank(self, trace: Trace, splits: list[int], tolerant: bool = False) -> list[SplitRanking]:
        """Every policy's ranking of all layers, at every split. splits: ascending, each in 1..token-1.

        tolerant: note a policy that fails among the failures instead of raising PluginError.
        """
        probes = self._probes(trace, splits)
        parts = self._parts()
        needs_hidden = any(Need.HIDDEN_STATES in policy.needs for policy in self.policies)
        orders: dict[tuple[int, str], list[Tensor]] = {}
        failures: dict[str, str] = {}
        utility: list[list[Tensor]] = [[] for _ in splits]
        for layer in range(self.traces.layers):
            q, k, v = (part.float() for part in trace.layer(layer))
            h = trace.hidden(layer).float() if needs_hidden else None
            found = utilities(q, k, trace.info.scaling, splits)
            for i, n in enumerate(splits):
                utility[i].append(found[i])
                seen = self._observation(trace, layer, (q[:, :n], k[:, :n], v[:, :n]), found[i])
                seen = replace(
                    seen, _parts=parts[layer] if parts else None, _hidden=None if h is None else h[None, :n]
                )
                for policy in self.policies:
                    spec, shown = spec_of(policy), seen
                    if spec in failures:
                        continue
                    if probed := probes.get((i, spec)):
                        shown = replace(
                            seen, _probe=probed[layer], _queries=q[None, :, :0], _shared=SharedWork()
                        )
                    try:
                        score = validated_score(policy, shown)
                    except PluginError as error:
                        if not tolerant:
                            raise
                        failures[spec] = str(error)
                        continue
                    order = rank(score, seen.positions, self.pins_of(policy), n)[0]
                    orders.setdefault((i, spec), []).append(order)
        made = [
            {spec: torch.stack(orders[i, spec]) for spec in self.specs if spec not in failures}
            for i in range(len(splits))
        ]
        return [SplitRanking(n, made[i], torch.stack(utility[i]), failures) for i, n in enumerate(splits)]

    def _parts(self) -> list[LayerParts]:
        """Those of the recorded layers, where a policy looks at them."""
        if self.lm is None or not any(policy.needs & FROM_PARTS for policy in self.policies):
            return []
        return [self.lm.parts[layer] for layer in self.lm.geometry.full_layers]

    def _probes(self, trace: Trace, splits: list[int]) -> dict[tuple[int, str], list[ProbeLayer]]:
        """Extra tokens of every layer by (split, policy); policies with equal ones share a pass."""
        found: dict[tuple[int, str], list[ProbeLayer]] = {}
        for i, n in enumerate(splits):
            read: list[tuple[Tensor, list[ProbeLayer]]] = []
            for policy in self.policies:
                if self.lm is None or Need.PROBE not in policy.needs:
                    continue
                tokens = validated_probe(bind_policy(self.lm, policy), self.lm)
                same = next((one for known, one in read if torch.equal(known, tokens)), None)
                if same is None:
                    read.append((tokens, same := probe_trace(self.lm, trace, n, policy)))
                found[i, spec_of(policy)] = same
        return found

    def _observation(
        self, trace: Trace, layer: int, recorded: tuple[Tensor, Tensor, Tensor], future: Tensor
    ) -> Observation:
        """What a policy sees of one recorded layer, as if its n tokens had just been prefilled."""
        q, k, v = recorded
        n = k.shape[1]
        return Observation(
            layer=layer,
            n_layers=self.traces.layers,
            full_index=layer,
            keys=k[None],
            values=v[None],
            positions=torch.arange(n).expand(1, k.shape[0], -1),
            new=n,
            seen=n,
            scaling=trace.info.scaling,
            _draw=draw_key(self.seed, trace.info.id),
            _queries=q[None],
            _future=lambda: future[None],
        )


def _describe(traces: TraceSet) -> ModelDescription:
    """The model of recorded layers: float32 on the CPU, all of them evicted."""
    layers = tuple(range(traces.layers))
    cpu = torch.device("cpu")
    return ModelDescription(
        name=traces.header["model"],
        layers=traces.layers,
        evicted_layers=layers,
        query_heads=traces.header["query_heads"],
        kv_heads=traces.kv_heads,
        head_dim=traces.dim,
        width=None,
        devices=(cpu,) * traces.layers,
        device=cpu,
        dtype=torch.float32,
    )


def policies_for(traces: TraceSet, specs: Iterable[str]) -> tuple[list[Policy], list[str]]:
    """The policies, each once, and notes on those that "all" brought and that traces cannot rank.

    Raises: KvbenchError for one that was named: trained for another model, or reading what is not recorded.
    """
    asked = list(specs)
    parsed = [POLICIES.parse(spec) for spec in expand_policies(asked)]
    model = TrainedFor(traces.layers, traces.kv_heads, traces.dim, traces.header["model_sha256"])
    policies, left_out = [], []
    for spec, policy in {spec_of(policy): policy for policy in parsed}.items():
        try:
            check_trained(policy, traces.header["model"], model)
            _check_recorded(policy, traces)
            policies.append(policy)
        except BadInput as error:
            if spec in asked or "all" not in asked:
                raise
            left_out.append(f"{spec} is left out: {error}")
    return policies, left_out


def _check_recorded(policy: Policy, traces: TraceSet) -> None:
    """Raises BadInput for a policy that reads what traces do not hold."""
    if Need.HIDDEN_STATES in policy.needs and not traces.has_hidden:
        raise BadInput(
            f"{spec_of(policy)} reads hidden states, which {traces.folder} does not hold: make it again with "
            "kvbench trace --hidden"
        )
    if lacking := sorted(need.value for need in policy.needs & NOT_RECORDED):
        raise BadInput(
            f"{spec_of(policy)} reads {' and '.join(lacking)}, which traces do not hold: "
            "measure it with kvbench run"
        )


def learned_policies() -> list[str]:
    """Registered policies whose plain form has learned weights."""
    broken = POLICIES.failures()
    names = [name for name in POLICIES.names() if name not in broken]
    return [name for name in names if POLICIES.parse(name).trained_for is not None]


def boundary(trace: Trace) -> list[int]:
    """The split where the question begins."""
    return [max(1, trace.info.context)]


def open_recorder(traces: TraceSet, device: str = "auto", dtype: str = "float32") -> OpenModel:
    """The model that recorded the traces. Raises BadInput when it is another one now."""
    opened = open_model(traces.header["model"], device, dtype)
    if opened.sha256 != traces.header["model_sha256"]:
        raise BadInput(
            f"{traces.folder} was recorded with another model under the name {opened.name}: record it again"
        )
    return opened


def probe_trace(lm: LoadedModel, trace: Trace, n: int, policy: Policy) -> list[ProbeLayer]:
    """A policy's extra tokens in every layer, read after the first n tokens of a trace.

    The recorded keys and values are the cache, so no token of the trace is read again. Raises BadInput
    where layers are missing in the trace (sliding windows), PluginError as `validated_probe`.
    """
    if len(lm.geometry.full_layers) < lm.geometry.layers:
        raise BadInput(
            f"{policy.name} reads extra tokens, which need every layer, and traces of {lm.name} lack the "
            "layers with a sliding window: measure it with kvbench run"
        )
    with lm.rotation.whole(trace.info.tokens):
        return _probe_trace(lm, trace, n, policy)


def _probe_trace(lm: LoadedModel, trace: Trace, n: int, policy: Policy) -> list[ProbeLayer]:
    tokens = validated_probe(bind_policy(lm, policy), lm)
    if why := check_room(policy, lm, n, len(tokens)):
        raise PluginError(why)
    cache = Cache.empty(lm.geometry.layers, n + tokens.shape[0])
    for layer in range(lm.geometry.layers):
        _, keys, values = trace.layer(layer)
        keys, values = (part[None, :, :n].to(lm.device, lm.dtype) for part in (keys, values))
        cache.buckets[0].append(layer, keys, values, torch.arange(n))
    found: list[ProbeLayer] = []

    def observer(layer: Layer) -> None:
        keys = layer.bucket.view(layer.index)[0][:, :, n:]
        found.append(ProbeLayer(layer.queries.float().cpu(), keys.float().cpu()))

    read_probe(lm, cache, tokens, n, observer)
    return found
