"""The row: one measurement of one configuration on one sample, with everything needed to read it alone.

`kvbench run`, `eviction-error` and `speed` all write this type, and tables take their columns from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..contract.identity import config_of, key_of, off_default, row_axes

SCHEMA = 1  # of rows and manifest; older ones stay readable (see row_reader), newer ones are refused
STATUSES = ("ok", "skipped", "failed")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row.

    key, config, family: hashes (see `contract.identity`). settings: the configuration, by axis. spec,
    task_spec: policy and task as written. pins_mode: the rule that the pins follow. data: its source, in
    words. context_tokens, question_tokens: read; prompt_sha256: of what was read and scored, as token ids.
    seen_share: of the prompt's 8-token runs, those in the text that the policy's weights were trained on,
    where that is known. cut_tokens: of the data, left out of the prompt. kept: KV
    pairs per KV head and evicted layer; peak: the most there were while the context was read. status: ok,
    skipped or failed, with the reason. gold_label, label: of choice tasks. metrics: see `contract.metrics`.
    times: s, and rates that depend on the machine. score_layers_s: s for each layer, of `kvbench speed`.
    """

    key: str
    config: str
    family: str | None = None
    settings: Mapping[str, Any]
    spec: str
    task_spec: str
    data: str | None = None
    pins_mode: str
    sample: str
    context_tokens: int | None = None
    question_tokens: int | None = None
    prompt_sha256: str | None = None
    seen_share: float | None = None
    cut_tokens: int | None = None
    kept: float | None = None
    peak: int | None = None
    layers: int | None = None
    evicted_layers: int | None = None
    status: str = "ok"
    reason: str = ""
    note: str = ""
    text: str = ""
    gold_label: str | None = None
    label: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    score_layers_s: Sequence[float] | None = None
    schema: int = SCHEMA

    @classmethod
    def of(cls, configuration: Mapping[str, Any], sample: str, source: Any = None, **known: Any) -> Row:
        """A row under the keys that follow from its configuration; source: as in `config_of`."""
        config = config_of(configuration, source)
        settings = {axis.name: configuration[axis.name] for axis in row_axes() if axis.name in configuration}
        return cls(key=key_of(config, sample), config=config, settings=settings, sample=sample, **known)

    @property
    def title(self) -> str:
        """What was measured, in words."""
        budget = self.settings["budget"]
        at = "" if budget is None else f" at {budget}"
        return f"{self.spec}{at}, {self.task_spec}, sample {self.sample!r}"

    def as_dict(self) -> dict[str, Any]:
        """The row as it is written: flat, without axes at their default."""
        flat: dict[str, Any] = {"schema": self.schema}
        for one in _FIELDS:
            value = getattr(self, one.name)
            if one.name == "settings":
                flat.update(off_default(value))
            elif value is not None or one.name != "score_layers_s":
                flat[one.name] = value
        return flat


_FIELDS = tuple(one for one in fields(Row) if one.name != "schema")
