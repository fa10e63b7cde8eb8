"""lm-eval's task configurations: found by name and read as lm-eval reads them, in milliseconds.

lm-eval's own index parses 14,000 files, which takes ten seconds; here one file is read.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import BadInput, PluginError, UnknownName

Config = dict[str, Any]
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
TESTED = "use lm-eval 0.4.9 to 0.4.13"


def tasks_folder() -> Path:
    """lm_eval/tasks, found without importing lm_eval. Raises PluginError when it is not there."""
    package = importlib.util.find_spec("lm_eval")
    for root in (package.submodule_search_locations or []) if package else []:
        if (Path(root) / "tasks").is_dir():
            return Path(root) / "tasks"
    raise PluginError("lm-eval has no task configurations: pip install 'lm-eval>=0.4.9'")


def path_of(file: str) -> Path:
    """The path of a configuration file. file: relative to lm_eval/tasks."""
    path = tasks_folder() / file
    if not path.is_file():
        raise PluginError(f"lm-eval has no tasks/{file} any more: {TESTED}")
    return path


@functools.cache
def find(name: str) -> Path:
    """The configuration of the task with this name, without running anything.

    Raises UnknownName with the closest names; BadInput for a group.
    """
    found = _names()
    if name not in found:
        raise UnknownName("lm-eval task", name, _near(name, found), "These are lm-eval's names close to it.")
    return found[name]


@functools.cache
def _names() -> dict[str, Path]:
    """Name of every task -> file, by one pattern over the texts (0.5 s)."""
    line = re.compile(rb"^[\"']?task[\"']?:[ \t]*[\"']?([^\s\"'#]+)[\"']?[ \t]*(?:#.*)?\r?$", re.MULTILINE)
    found: dict[str, Path] = {}
    for path in sorted(tasks_folder().rglob("*.yaml")):
        for name in line.findall(path.read_bytes()):
            found.setdefault(name.decode(), path)
    return found


def _near(name: str, known: dict[str, Path]) -> list[str]:
    import difflib

    return difflib.get_close_matches(name, known, n=8, cutoff=0.4)


def read(path: Path, functions: bool = True) -> Config:
    """A configuration with what it includes; its own keys win.

    functions: import what `!function` names, else keep the name as a text.
    Raises BadInput when a function cannot be imported, which lm-eval's optional packages cause.
    """
    config = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader(path.parent, functions))
    included = config.pop("include", [])
    merged: Config = {}
    for file in included if isinstance(included, list) else [included]:
        merged |= read(path.parent / file, functions)
    return merged | config


def evaluated_split(config: Config) -> str:
    """The split that lm-eval evaluates. Raises BadInput when the configuration names none."""
    for key in ("test_split", "validation_split"):
        if config.get(key):
            return str(config[key])
    raise BadInput(f"lm-eval's task {config.get('task')} names no test and no validation split")


def fewshot_split(config: Config) -> str:
    """The split that lm-eval takes few-shot examples from."""
    return str(config.get("fewshot_split") or config.get("training_split") or evaluated_split(config))


def _loader(folder: Path, functions: bool) -> type[yaml.SafeLoader]:
    class Loader(yaml.SafeLoader):
        """YAML with lm-eval's `!function module.name`."""

    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        name = loader.construct_scalar(node)
        return _function(name, folder) if functions else name

    Loader.add_constructor("!function", function)
    return Loader


def _function(name: str, folder: Path) -> Any:
    """The function of a module beside the configuration, else of any importable module."""
    module, _, attribute = name.rpartition(".")
    beside = folder / f"{module.replace('.', '/')}.py"
    if beside.is_file():
        inside = beside.relative_to(tasks_folder()).with_suffix("")
        module = ".".join(("lm_eval", "tasks", *inside.parts))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of optional packages about other optional packages
            return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise BadInput(f"lm-eval's {module} cannot be imported: {' '.join(str(error).split())}") from error
