"""Every number kvbench reports: its unit, its direction and how samples combine.

Tables and axis labels come from here, so a value and its unit cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from ..errors import PluginError, StoreError, UnknownName


@dataclass(frozen=True)
class Metric:
    """One kind of number.

    unit: as printed ("nats/token", "bytes", "0..1"). description: one phrase. better: which
    direction is good, "none" where neither is. limits: values outside cannot occur; an end may be
    None. combine: how the samples of a cell become one number: "mean", or "ppl" for
    exp(sum(nll * nll_tokens) / sum(nll_tokens)). graded: False where a sample's 0 or 1 is an answer that is
    wrong or right; True for a quantity that only happens to be 0 or 1.
    """

    name: str
    unit: str
    description: str
    better: Literal["higher", "lower", "none"] = "higher"
    limits: tuple[float | None, float | None] | None = (0.0, 1.0)
    combine: Literal["mean", "ppl"] = "mean"
    graded: bool = False

    def counts_answers(self, values: Any) -> bool:
        """Are these values, one per sample, answers that are wrong (0) or right (1)?"""
        return not self.graded and self.limits == (0.0, 1.0) and set(map(float, values)) <= {0.0, 1.0}

    @property
    def label(self) -> str:
        """Axis label: name, unit and direction."""
        direction = "" if self.better == "none" else f"{self.better} is better"
        inside = ", ".join(part for part in (self.unit, direction) if part)
        words = self.name.replace("_", " ")
        return f"{words} ({inside})" if inside else words


POSITIVE = (0.0, None)
_BUILT_IN = (
    Metric("accuracy", "0..1", "share of samples answered correctly (lm-eval's acc)"),
    Metric("acc_norm", "0..1", "accuracy when choices are compared by log-likelihood per byte"),
    Metric("string_match", "0..1", "share of the expected strings found in the answer (RULER's scoring)"),
    Metric("agreement", "0..1", "share of samples answered as with the full cache"),
    Metric("kl", "nats/token", "KL(full || cell) over the reference continuation", "lower", POSITIVE),
    Metric("nll", "nats/token", "negative log-likelihood of the reference continuation", "lower", POSITIVE),
    Metric("ppl", "", "perplexity of the reference continuations, per token", "lower", (1.0, None), "ppl"),
    Metric(
        "missed_mass", "0..1", "share of future attention that falls on evicted tokens", "lower", graded=True
    ),
    Metric("eviction_cost", "ratio", "cost of the ranking over the oracle's", "lower", (1.0, None)),
    Metric("majority_rate", "0..1", "accuracy of always giving the most common gold label", "none"),
    Metric("label_share", "0..1", "share of the label that was predicted most often", "none"),
    Metric("kept", "pairs", "KV pairs kept per KV head and layer, measured", "none", POSITIVE),
    Metric("kv_bytes", "bytes", "size of the compacted cache", "lower", POSITIVE),
    Metric("prefill_s", "s", "reading the context, shared by all cells of a sample", "lower", POSITIVE),
    Metric("score_s", "s", "scoring the context's tokens", "lower", POSITIVE),
    Metric("rank_s", "s", "ordering the slots of all layers by their score", "lower", POSITIVE),
    Metric("compact_s", "s", "cutting to the budget and gathering what stays", "lower", POSITIVE),
    Metric("decode_rate", "tokens/s", "decoding one token after another", "higher", POSITIVE),
    Metric("prefill_flops", "FLOP", "operations of a prefill, from its shapes", "none", POSITIVE),
    Metric("score_flops", "FLOP", "operations of a score's matrix products", "none", POSITIVE),
    Metric("matmul_rate", "FLOP/s", "what a square matrix product reaches here", "none", POSITIVE),
    Metric("answer_s", "s", "answering on the compacted cache", "lower", POSITIVE),
    Metric("peak_bytes", "bytes", "largest memory in use", "lower", POSITIVE),
)
_known: dict[str, Metric] = {item.name: item for item in _BUILT_IN}
METRICS: Mapping[str, Metric] = MappingProxyType(_known)
NONE: Mapping[str, Metric] = MappingProxyType({})


def is_known(name: str) -> bool:
    return name in METRICS


def metric(name: str) -> Metric:
    """Look a metric up.

    Raises: UnknownName, which lists the known ones.
    """
    if name not in METRICS:
        raise UnknownName("metric", name, METRICS, "A task's own metric is declared with add_metric.")
    return METRICS[name]


def describe(name: str, stored: Mapping[str, Metric] = NONE) -> Metric:
    """The metric: as a loaded task declares it, else as it was stored, else a plain one without unit.

    stored: what runs have stored beside their rows (see `load_metrics`): results outlive their plugins.
    """
    known = METRICS.get(name) or stored.get(name)
    return known or Metric(name, "", "declared by a plugin that is not loaded", "none", None)


def in_order(names: Iterable[str], stored: Mapping[str, Metric] = NONE) -> list[str]:
    """Names in the order of the metric table, then in that of stored metrics, then by the alphabet."""
    wanted = set(names)
    known = [name for name in {**METRICS, **stored} if name in wanted]
    return known + sorted(wanted.difference(known))


def dump_metrics() -> dict[str, dict[str, Any]]:
    """Metrics that tasks declared, as JSON-able values: a run stores them beside its rows."""
    return {name: asdict(one) for name, one in _known.items() if one not in _BUILT_IN}


def load_metrics(stored: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics that `dump_metrics` stored. Raises: StoreError for what it cannot have stored."""
    found = {}
    for name, values in stored.items():
        try:
            limits = values.get("limits")
            found[name] = Metric(**{**values, "limits": limits and tuple(limits)})
        except (TypeError, AttributeError, ValueError) as error:
            raise StoreError(f"metric {name!r} of the manifest cannot be read ({error})") from error
    return found


def add_metric(new: Metric) -> None:
    """Declare a task's own metric; declaring the same one twice is harmless.

    Raises: PluginError when the name already means something else.
    """
    old = METRICS.get(new.name)
    if old is not None and old != new:
        raise PluginError(
            f"metric '{new.name}' is already declared as {old.description} ({old.unit}): "
            "give yours another name"
        )
    _known[new.name] = new
