"""What tells a row from the same row measured again."""

from __future__ import annotations

from ..store.row import Row

# Fields that rows of the first releases do not have.
LATER = ("family", "data", "cut_tokens", "prompt_sha256", "seen_share")
ASIDE = ("schema", "times", "metrics", "pins_mode")  # the last says who asked; `pins` is what was done


def differences(before: Row, after: Row, tolerance: float) -> list[str]:
    """Fields and metrics that differ, in words; none when all metrics are within the tolerance (relative
    from 1 on) and everything else but the times is equal."""
    then, now = before.as_dict(), after.as_dict()
    aside = {*ASIDE, *(name for name in LATER if then[name] is None)}
    if "prompt_sha256" not in aside and then["prompt_sha256"] != now["prompt_sha256"]:
        aside.add("prompt_sha256")
        prompt = ["its prompt has changed: other text, template or tokenizer"]
    else:
        prompt = []
    told = prompt + [
        f"{name} {then.get(name)!r} then, {now.get(name)!r} now"
        for name in {**then, **now}
        if name not in aside and then.get(name) != now.get(name)
    ]
    old, new = before.metrics, after.metrics
    far = [name for name in {**old, **new} if not _close(old.get(name), new.get(name), tolerance)]
    return told + [f"{name} {old.get(name)} then, {new.get(name)} now" for name in far]


def _close(old: float | None, new: float | None, tolerance: float) -> bool:
    if old is None or new is None:
        return False
    return abs(old - new) <= tolerance * max(1.0, abs(old))
