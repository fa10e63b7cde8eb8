"""What a row belongs to: the axes of its configuration, and the keys that follow from them.

Run, resume, verify, rerun, eviction error and speed all take their keys from here. To add an axis:

1. Declare it in AXES; its default is the value that every row had before the axis existed.
2. Give its value where a configuration is made: in `Cell.as_dict`, or in `Workload.configuration`.
3. Name it in `stats.panels` (RULE_COLUMNS) and `stats.aggregate` (COLUMNS) if tables and figures shall keep
   its values apart. The option itself goes through `cli.run`, `study.config` and `study.plan` to the engine.

A default is neither hashed nor written, so old rows keep their keys and new rows at the default join them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED: Any = object()  # the default of what has none


@dataclass(frozen=True)
class Axis:
    """One thing that may change the numbers of a row.

    kind: type of its value as JSON has it (`int | None`). default: what every row had before the axis
    existed; the axes of schema 1 have none and are always hashed. in_row: False where the manifest says
    it once for all rows. pooled: rows that differ only in it are one family, whose samples are pooled.
    """

    name: str
    kind: Any
    default: Any = REQUIRED
    in_row: bool = True
    pooled: bool = False


AXES = (
    Axis("policy", str),
    Axis("params", Mapping),
    Axis("budget", int | None),
    Axis("pins", tuple[int, int]),
    Axis("schedule", str),
    Axis("chunk", int | None),
    Axis("weights", str | None),  # None in rows of before policies could learn
    Axis("task", str),
    Axis("task_params", Mapping),
    Axis("data_sha256", str, in_row=False),
    Axis("model", str),
    Axis("model_sha256", str, in_row=False),
    Axis("dtype", str, in_row=False),
    Axis("question", str),
    Axis("template", str),
    Axis("seed", int, pooled=True),
    Axis("template_args", Mapping, default={}),  # given to the chat template
    Axis("weights_for", str, default=""),  # the model's fingerprint that learned weights were forced from
)


def row_axes() -> tuple[Axis, ...]:
    """The axes that stand in every row."""
    return tuple(axis for axis in AXES if axis.in_row)


def off_default(configuration: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The axes of a configuration, in the order of AXES, without those at their default."""
    unknown = set(configuration) - {axis.name for axis in AXES}
    assert not unknown, f"no axis: {unknown}"
    for axis in AXES:
        if axis.name in configuration and configuration[axis.name] != axis.default:
            yield axis.name, configuration[axis.name]


def config_of(configuration: Mapping[str, Any], source: Any = None) -> str:
    """Hash of a configuration: of everything that changes numbers, except the sample.

    configuration: values by axis. source: what the numbers come from, where that is not data that a model
    reads (recorded traces, a machine).
    """
    hashed = dict(off_default(configuration))
    return fingerprint(hashed if source is None else [hashed, source])


def family_of(configuration: Mapping[str, Any], seeded: bool) -> str:
    """Hash of a configuration apart from its seed. seeded: the data depend on the seed, too."""
    left_out = {axis.name for axis in AXES if axis.pooled} | ({"data_sha256"} if seeded else set())
    return config_of({name: value for name, value in configuration.items() if name not in left_out})


def key_of(config: str, sample: str) -> str:
    """The identity of a row: its configuration and its sample."""
    return fingerprint([config, sample])


def fingerprint(value: Any) -> str:
    """16 hex digits of the SHA-256 of a JSON-able value; equal values give equal digits."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
