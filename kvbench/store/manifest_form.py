"""The form of a manifest: which sections it has, and of which types. What does not fit is refused when read.

Written by hand, like the columns of rows: every command reads manifests, and needs no library for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..contract.metrics import load_metrics
from ..errors import StoreError

# A form is a type of JSON, or several; a list of one form (a list of such), a dict of forms by name (an
# object; "name?" may be absent, and other names may be there), or Each (an object with any names).
Form = Any
TEXT, NULL, NUMBERS = str, type(None), (int, float)
WORDS = {str: "a text", int: "a whole number", float: "a number", dict: "an object", list: "a list",
         bool: "true or false", NULL: "null"}  # fmt: skip


@dataclass(frozen=True)
class Each:
    """An object with any names, whose values have one form."""

    form: Form


RUN: Form = {
    "started?": TEXT,
    "command?": TEXT,
    "settings?": {
        "policies": [TEXT],
        "tasks": [TEXT],
        "budgets": [int],
        "seed?": int,
        "seeds?": [int],
        "fresh?": [TEXT],
        "draft?": bool,
        **dict.fromkeys(("model?", "device?", "dtype?", "protocol?", "template?"), TEXT),
        **dict.fromkeys(("schedule?", "pins?", "question?", "data?", "out?"), (TEXT, NULL)),
        **dict.fromkeys(("limit?", "chunk?"), (int, NULL)),
    },
    "versions?": dict,
    "machine?": dict,
    "executor?": TEXT,
    "peak_bytes?": int,
    "rows?": int,
}
MANIFEST_FORM: Form = {
    "schema": int,
    "fixed": {"model?": TEXT, "model_sha256?": TEXT, "dtype?": TEXT, "device?": TEXT, "traces?": dict},
    "versions?": dict,
    "machine?": dict,
    "runs": [RUN],
    "style?": Each({"color?": (TEXT, NULL), "dashed?": bool, "bracket?": (TEXT, NULL)}),
    "tasks?": Each({"metric": TEXT, "source?": TEXT, "data?": TEXT, "data_sha256?": TEXT}),
    "data?": Each({"task": TEXT, "seed?": (int, NULL), "source?": TEXT}),
    "metrics?": Each(
        {
            "name": TEXT,
            "unit": TEXT,
            "description": TEXT,
            "better?": TEXT,
            "limits?": (list, NULL),
            "combine?": TEXT,
            "graded?": bool,
        }
    ),
    "code?": Each({"module?": TEXT, "distribution?": (TEXT, NULL), "sha256?": (TEXT, NULL)}),
}


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raises: StoreError naming the place that has another form than MANIFEST_FORM."""
    if fault := _fault(manifest, MANIFEST_FORM, ""):
        raise StoreError(fault)
    for name, values in manifest.get("metrics", {}).items():
        limits = values.get("limits")
        if limits is not None and (len(limits) != 2 or not all(_is(one, (*NUMBERS, NULL)) for one in limits)):
            raise StoreError(f"metrics.{name}.limits is {limits!r:.60}, not two numbers or null")
    load_metrics(manifest.get("metrics", {}))


def _fault(value: Any, form: Form, place: str) -> str:
    """What does not fit, in words; "" where all does."""
    if isinstance(form, Each):
        return _fault(value, dict, place) or _first(
            _fault(one, form.form, f"{place}.{name}") for name, one in value.items()
        )
    if isinstance(form, dict):
        return _fault(value, dict, place) or _first(_field(value, name, form[name], place) for name in form)
    if isinstance(form, list):
        return _fault(value, list, place) or _first(
            _fault(one, form[0], f"{place}[{index}]") for index, one in enumerate(value)
        )
    kinds = form if isinstance(form, tuple) else (form,)
    if _is(value, kinds):
        return ""
    return f"{place or 'it'} is {value!r:.60}, not {' or '.join(WORDS[kind] for kind in kinds)}"


def _field(value: Mapping[str, Any], name: str, form: Form, place: str) -> str:
    key = name.removesuffix("?")
    at = f"{place}.{key}" if place else key
    if key in value:
        return _fault(value[key], form, at)
    return "" if name.endswith("?") else f"{at} is missing"


def _first(faults: Iterator[str]) -> str:
    return next(filter(None, faults), "")


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    """Exactly of one of these types: true is no whole number."""
    return type(value) in kinds
