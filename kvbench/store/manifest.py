"""manifest.json: how the numbers of a run folder were made, by what and on what kind of machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..contract.code import same_code
from ..contract.files import replace_file
from ..contract.metrics import Metric, load_metrics
from ..errors import StoreError
from .manifest_form import check_manifest
from .row import SCHEMA

MANIFEST = "manifest.json"
LATER = ("prompting_sha256",)  # facts that manifests of the first releases do not have
PACKAGES = ("torch", "transformers", "lm_eval", "kvbench")


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a run folder.

    Raises: StoreError when it is missing, broken or of a newer kvbench.
    """
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"no {MANIFEST} in {path}: name the folder that `kvbench run` wrote") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {file} ({error}): restore it or use another folder") from error
    if not isinstance(manifest, dict) or type(manifest.get("schema")) is not int:
        raise StoreError(f"{file} is not a kvbench manifest: name the folder that `kvbench run` wrote")
    if manifest["schema"] > SCHEMA:
        raise StoreError(
            f"{file} has schema {manifest['schema']}, this kvbench reads up to {SCHEMA}: upgrade kvbench"
        )
    try:
        check_manifest(manifest)
    except StoreError as error:
        raise StoreError(f"{file}: {error}; restore the file or use another folder") from error
    return manifest


def prepare_manifest(
    folder: Path,
    fixed: Mapping[str, Any],
    extra: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    fresh: Collection[str] = (),
) -> list[str]:
    """Write the manifest of a new folder, or check `fixed` against an old one; note this invocation.

    extra: sections (dicts) merged into those already there. settings: of this invocation. fresh: names whose
    code may differ, because their rows are made again. Returns what the user should hear.
    Raises: StoreError naming every field of `fixed` that differs, or whose code does.
    """
    asked = json.loads(json.dumps(dict(fixed)))  # tuples become lists, as they are read back
    versions, here, notes = _versions(), machine(), []
    run: dict[str, Any] = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "command": _command()}
    if settings is not None:
        run["settings"] = json.loads(json.dumps(dict(settings)))
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        _check_fixed(folder, manifest.get("fixed", {}), asked)
        manifest["fixed"] = {**manifest["fixed"], **asked}
        _check_code(folder, manifest.get("code", {}), extra.get("code", {}), fresh)
        for name, now in (("versions", versions), ("machine", here)):
            if any(manifest.get(name, {}).get(key) != value for key, value in now.items()):
                run[name] = now  # provenance of the rows this invocation adds
                notes.append(f"{folder} was begun with other {name}; the manifest lists both")
    else:
        manifest = {"schema": SCHEMA, "fixed": asked, "versions": versions, "machine": here, "runs": []}
    for section, values in extra.items():
        manifest[section] = {**manifest.get(section, {}), **values}
    manifest["runs"].append(run)
    _write(folder / MANIFEST, manifest)
    return notes


def stored_metrics(manifest: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics that the tasks of a run declared."""
    return load_metrics(manifest.get("metrics", {}))


def shown_data(data: bytes) -> str:
    """What a figure says about the file of numbers that it shows."""
    return f"kvbench data sha256 {hashlib.sha256(data).hexdigest()}"


def note_run(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add what only the end of an invocation knows to its entry in the manifest."""
    manifest = read_manifest(folder)
    manifest["runs"][-1] |= facts
    _write(folder / MANIFEST, manifest)


def _check_fixed(folder: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    old, new = _leaves(there), _leaves(asked)
    later = {name for name in LATER if name not in old}
    names = [name for name in {**old, **new} if name not in later and _show(old, name) != _show(new, name)]
    if names:
        listing = "; ".join(
            f"{name}: {_show(old, name)} there, {_show(new, name)} asked" for name in sorted(names)
        )
        raise StoreError(
            f"{folder} holds results of another configuration ({listing}): numbers would be mixed. "
            "Use another --out, or the same settings"
        )


def _check_code(
    folder: Path, there: Mapping[str, Any], here: Mapping[str, Any], fresh: Collection[str]
) -> None:
    """Refuse to add to rows of a policy or task whose source has changed since."""
    changed = []
    for part in there.keys() & here.keys():
        if not same_code(there[part], here[part]) and part.partition(" ")[2] not in fresh:
            changed.append(part)
    if changed:
        names = ",".join(sorted({part.partition(" ")[2] for part in changed}))
        raise StoreError(
            f"the code of {', '.join(sorted(changed))} has changed since rows in {folder} were made: "
            f"--fresh {names} computes these rows again, another --out keeps both"
        )


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as {"a.b": value}."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        leaves.update(_leaves(inner, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def _show(leaves: Mapping[str, Any], name: str) -> str:
    return json.dumps(leaves[name]) if name in leaves else "nothing"


def _write(file: Path, manifest: Mapping[str, Any]) -> None:
    text = json.dumps(manifest, indent=2, ensure_ascii=True) + "\n"
    replace_file(file, lambda draft: draft.write_text(text, encoding="utf-8"))


def _command() -> str:
    program = Path(sys.argv[0])
    if program.name == "kvbench" or program.parent.name == "kvbench":
        return shlex.join(["kvbench", *sys.argv[1:]])
    return "python API"


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions["commit"] = _commit()
    return versions


def _commit() -> str | None:
    """Commit of kvbench's own source, with "+" when tracked files differ; None outside a repository."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an environment inside another project's repository
        head = git("rev-parse", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    """Kind of machine, without names or paths. memory in bytes."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    except OSError:
        pass  # not Linux
    try:
        memory: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        memory = None
    kind = f"{platform.system()} {platform.machine()}"
    return {"cpu": model, "cores": os.cpu_count(), "memory": memory, "platform": kind}
