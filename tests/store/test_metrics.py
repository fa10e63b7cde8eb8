"""The metric table."""

from __future__ import annotations

import pytest

from kvbench.contract import metrics
from kvbench.contract.metrics import METRICS, Metric, add_metric, describe, is_known, metric
from kvbench.errors import PluginError, UnknownName


def test_label_states_unit_and_direction() -> None:
    assert metric("kl").label == "kl (nats/token, lower is better)"
    assert metric("kept").label == "kept (pairs)"
    assert metric("ppl").label == "ppl (lower is better)"


def test_unknown_metric_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'accuracy'.*agreement.*kl"):
        metric("acuracy")


def test_the_table_cannot_be_edited() -> None:
    with pytest.raises(TypeError):
        METRICS["mine"] = metric("kl")  # type: ignore[index]


def test_a_plugin_adds_a_metric_but_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_known("rouge")
    assert describe("rouge").unit == ""
    mine = Metric("rouge", "0..1", "longest common subsequence, F1")
    monkeypatch.delitem(metrics._known, "rouge", raising=False)
    add_metric(mine)
    try:
        add_metric(mine)
        assert metric("rouge") is mine
        with pytest.raises(PluginError, match="already declared"):
            add_metric(Metric("rouge", "nats", "something else"))
        with pytest.raises(PluginError, match="already declared"):
            add_metric(Metric("kl", "bits", "in another unit"))
        assert metric("kl").unit == "nats/token"
    finally:
        del metrics._known["rouge"]
