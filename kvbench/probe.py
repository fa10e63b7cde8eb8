"""Extra tokens of a policy: read after the context, looked at, and forgotten.

They attend to the cache and to each other, as if they stood after the context. Their pass appends to the
cache and takes that back, so what is stored, and every later position, is as if they had never been there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention import Layer, Observer, Pass
from .cache import Cache
from .errors import BadInput, KvbenchError, PluginError
from .observe import Probed
from .policy import Need, Policy
from .score import reason

if TYPE_CHECKING:
    from .loop import Ranker, Ranking
    from .models import LoadedModel
    from .trace import Trace


@dataclass
class _Asked:
    """Rankers that read the same extra tokens, by row. tokens: their embeddings (n, d_model)."""

    tokens: Tensor
    rows: dict[int, list[Ranker]] = field(default_factory=dict)


def probe_tokens(policy: Policy) -> int:
    """How many extra tokens a policy reads."""
    tokens = policy.probe if Need.PROBE in policy.needs else None
    return tokens.shape[0] if isinstance(tokens, Tensor) and tokens.dim() == 2 else 0


def rank_probed(lm: LoadedModel, cache: Cache, new: int, ranking: Ranking) -> None:
    """Rank every row for its policies with extra tokens; equal tokens are read once, for all who want them.

    new: tokens of the chunk that was read last. The time of a pass counts in full for each of its
    rankers: alone, each would need it. The cache is left as it was.
    """
    for asked in _asked(lm, ranking):
        started, scoring = time.perf_counter(), sum(ranking.seconds.values())
        rows = sorted(asked.rows)
        part = cache if len(rows) == cache.rows else cache.take_rows(rows)
        wanted = [asked.rows[row] for row in rows]
        own = replace(
            ranking,
            wanted=wanted,
            orders={},
            failed={},
            hidden={},
            flags=[],
            probed=len(asked.tokens),
            new=new,
        )
        mark = part.mark()
        read_embedded(lm, part, asked.tokens, ranking.seen, own)
        part.rewind(mark)
        ranking.orders |= {(rows[row], ranker): order for (row, ranker), order in own.orders.items()}
        ranking.failed |= {(rows[row], ranker): reason for (row, ranker), reason in own.failed.items()}
        ranking.flags += [(rows[row], ranker, layer, flag) for row, ranker, layer, flag in own.flags]
        seconds = time.perf_counter() - started - (sum(ranking.seconds.values()) - scoring)
        for ranker in dict.fromkeys(ranker for row in wanted for ranker in row):
            ranking.seconds[ranker] = ranking.seconds.get(ranker, 0.0) + seconds


def _asked(lm: LoadedModel, ranking: Ranking) -> list[_Asked]:
    """The passes that the rows' policies need; a policy whose tokens cannot be read has failed."""
    found: list[_Asked] = []
    for row, rankers in enumerate(ranking.wanted):
        for ranker in rankers:
            if Need.PROBE not in ranker.policy.needs:
                continue
            try:
                tokens = validated_probe(ranker.policy, lm, ranking.seen)
            except KvbenchError as error:
                ranking.failed[row, ranker] = reason(ranker.policy, error)
                continue
            same = next((one for one in found if torch.equal(one.tokens, tokens)), None)
            if same is None:
                found.append(same := _Asked(tokens))
            same.rows.setdefault(row, []).append(ranker)
    return found


def validated_probe(policy: Policy, lm: LoadedModel, start: int) -> Tensor:
    """A policy's extra tokens, checked, in the model's dtype and on its device: (n, d_model).

    start: the position of the first. Raises PluginError that names the policy.
    """
    try:
        tokens = policy.probe
    except KvbenchError:
        raise
    except Exception as error:
        raise PluginError(f"policy '{policy.name}', probe: {type(error).__name__}: {error}") from error
    width = lm.model.get_input_embeddings().weight.shape[1]
    if not isinstance(tokens, Tensor) or not tokens.is_floating_point() or tokens.dim() != 2:
        raise PluginError(f"policy '{policy.name}': probe must be floating point embeddings (n, d_model)")
    if tokens.shape[0] < 1 or tokens.shape[1] != width or not tokens.isfinite().all():
        raise PluginError(
            f"policy '{policy.name}': probe has shape {tuple(tokens.shape)}; it must be finite and "
            f"(n, {width}) with n from 1 on, as {lm.name} reads embeddings"
        )
    if start + len(tokens) > lm.geometry.max_length:
        raise PluginError(
            f"policy '{policy.name}': {start} tokens and its {len(tokens)} extra ones are more than the "
            f"{lm.geometry.max_length} that {lm.name} reads; use shorter samples"
        )
    return tokens.to(lm.device, lm.dtype)


def read_embedded(lm: LoadedModel, cache: Cache, tokens: Tensor, start: int, observer: Observer) -> None:
    """Read embeddings (n, d_model) into every row, at positions start, start + 1, ..."""
    rows, n = cache.rows, tokens.shape[0]
    positions = torch.arange(start, start + n, device=tokens.device)
    lm.model.base_model(
        inputs_embeds=tokens.expand(rows, -1, -1),
        position_ids=positions.expand(rows, -1),
        use_cache=False,
        kv_pass=Pass(cache, positions, observer=observer),
    )


def probe_trace(lm: LoadedModel, trace: Trace, n: int, policy: Policy) -> list[Probed]:
    """A policy's extra tokens in every layer, read after the first n tokens of a trace.

    The recorded keys and values are the cache, so no token of the trace is read again. Raises BadInput
    where layers are missing in the trace (sliding windows), PluginError as `validated_probe`.
    """
    if len(lm.geometry.full_layers) < lm.geometry.layers:
        raise BadInput(
            f"{policy.name} reads extra tokens, which need every layer, and traces of {lm.name} lack the "
            "layers with a sliding window: measure it with kvbench run"
        )
    tokens = validated_probe(policy, lm, n)
    cache = Cache.empty(lm.geometry.layers, n + tokens.shape[0])
    for layer in range(lm.geometry.layers):
        _, keys, values = trace.layer(layer)
        keys, values = (part[None, :, :n].to(lm.device, lm.dtype) for part in (keys, values))
        cache.buckets[0].append(layer, keys, values, torch.arange(n))
    found: list[Probed] = []

    def observer(layer: Layer) -> None:
        keys = layer.bucket.view(layer.index)[0][:, :, n:]
        found.append(Probed(layer.queries.float().cpu(), keys.float().cpu()))

    read_embedded(lm, cache, tokens, n, observer)
    return found
