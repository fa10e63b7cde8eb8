"""A synthetic run: rows as the runner writes them, with known structure and no model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kvbench.contract.identity import fingerprint, row_axes
from kvbench.store.results import Row, Store

POLICIES = ("random", "streaming_llm", "knorm", "snapkv", "snapkv:window=64", "tova", "oracle")
BUDGETS = (32, 64, 128, 256, 512)
SKILL = {"random": 0.0, "oracle": 1.0, "snapkv": 0.8, "snapkv:window=64": 0.72, "tova": 0.6, "knorm": 0.25}
PINS = {"streaming_llm": [4, 0], "snapkv": [0, 32], "snapkv:window=64": [0, 64]}
STYLE: dict[str, dict[str, Any]] = {
    "full": {"color": "black", "dashed": False, "bracket": None},
    "random": {"color": None, "dashed": False, "bracket": "lower"},
    "oracle": {"color": None, "dashed": True, "bracket": "upper"},
    "streaming_llm": {"color": None, "dashed": False, "bracket": None},
    "knorm": {"color": None, "dashed": False, "bracket": None},
    "snapkv": {"color": "#0072b2", "dashed": True, "bracket": None},
    "snapkv:window=64": {"color": "#0072b2", "dashed": True, "bracket": None},
    "tova": {"color": None, "dashed": True, "bracket": None},
}
TASKS = {"boolq": {"metric": "accuracy"}, "needle:length=512": {"metric": "string_match"}}


def row(spec: str, budget: int | None, sample: str = "s0", **changes: Any) -> Row:
    """One row of the schema; `changes` overwrites fields, `metrics` are replaced as a whole."""
    base: dict[str, Any] = {
        "schema": 1, "policy": spec.split(":")[0], "spec": spec, "params": {}, "task": "boolq",
        "task_spec": "boolq", "task_params": {}, "model": "smollm2-135m", "budget": budget,
        "schedule": "prefill", "chunk": None, "pins": PINS.get(spec, [0, 0]), "pins_mode": "native",
        "question": "withheld", "template": "chat", "seed": 0, "sample": sample, "context_tokens": 1003,
        "question_tokens": 31, "kept": 1003 if budget is None else budget, "layers": 30,
        "evicted_layers": 0 if budget is None else 30, "status": "ok", "reason": "", "note": "",
        "text": "yes", "gold_label": None, "label": None, "metrics": {"accuracy": 1.0},
        "times": {"prefill_s": 0.5, "answer_s": 0.1},
    }  # fmt: skip
    base.update(changes)
    names = ("spec", "task_spec", "model", "budget", "schedule", "chunk", "pins", "question", "seed")
    base["config"] = fingerprint([base[name] for name in names])
    base["key"] = fingerprint([base["config"], base["sample"]])
    axes = {axis.name for axis in row_axes()}
    settings = {name: base.pop(name) for name in list(base) if name in axes}
    return Row(settings=settings, **base)


def _quality(spec: str, budget: int | None) -> float:
    if budget is None:
        return 0.95
    return 0.05 + 0.9 * (budget / 1003) ** (0.75 - 0.65 * SKILL.get(spec, 0.4))


def sample_rows(index: int, policies: tuple[str, ...] = POLICIES) -> list[Row]:
    """All rows of one boolq and one needle sample; a better policy is right on more samples."""
    draw = random.Random(index)
    luck, gold = draw.random(), "01"[draw.random() < 0.62]
    rows = []
    for spec in ("full", *policies):
        for budget in BUDGETS if spec != "full" else (None,):
            quality = _quality(spec, budget)
            right = luck < 0.55 + 0.25 * quality
            label = gold if right else "10"[int(gold)]
            spread = 0 if spec == "full" else (1 - quality) * (0.5 + draw.random())
            shared = {"kl": 2 * spread, "nll": 0.4 + spread, "nll_tokens": 3 + index % 4}
            if spec != "full":
                shared |= {"missed_mass": min(1, spread), "eviction_cost": 1 + 3 * spread}
            shared |= {"kv_bytes": 46080 * (budget or 1003), "agreement": float(spread < 0.9)}
            metrics = {"accuracy": float(right), **shared}
            labels = {"gold_label": gold, "label": label}
            rows.append(row(spec, budget, f"b{index}", **labels, metrics=metrics))
            needle = {"task": "needle", "task_spec": "needle:length=512", "task_params": {"length": 512}}
            metrics = {"string_match": float(luck < quality), **shared}
            rows.append(row(spec, budget, f"n{index}", **needle, metrics=metrics))
    return rows


def make_run(folder: Path, samples: int = 50) -> Path:
    fixed = {"model": "smollm2-135m", "seed": 0, "dtype": "float32"}
    with Store.open(folder, fixed, {"style": STYLE, "tasks": TASKS}) as store:
        for index in range(samples):
            store.append(sample_rows(index))
    return folder
