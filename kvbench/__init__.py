"""kvbench compares KV-cache eviction policies. `kvbench.run(RunConfig(...))` is the whole API.

Everything that a policy, a task or a plugin package needs is found here by name, and loads on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("kvbench runs on Linux and macOS only; on Windows use WSL")

if TYPE_CHECKING:
    from .contract.attention_sums import attention_rows as attention_rows
    from .contract.attention_sums import streamed_sums as streamed_sums
    from .contract.calibrated import Calibrated as Calibrated
    from .contract.calibration import Calibration as Calibration
    from .contract.calibration import load_calibration as load_calibration
    from .contract.calibration import write_calibration as write_calibration
    from .contract.identity import fingerprint as fingerprint
    from .contract.metrics import Metric as Metric
    from .contract.metrics import add_metric as add_metric
    from .contract.model_description import ModelDescription as ModelDescription
    from .contract.need import Need as Need
    from .contract.observation import Observation as Observation
    from .contract.pins import Pins as Pins
    from .contract.policy import Policy as Policy
    from .contract.policy import TrainedFor as TrainedFor
    from .contract.policy import param as param
    from .contract.quadratic import quadratic as quadratic
    from .contract.quadratic import weighted_gram as weighted_gram
    from .contract.registry import register as register
    from .contract.registry import register_task as register_task
    from .contract.second_pass import ContextText as ContextText
    from .contract.second_pass import Reading as Reading
    from .contract.second_pass import SecondPass as SecondPass
    from .contract.task import Answer as Answer
    from .contract.task import Sample as Sample
    from .contract.task import Samples as Samples
    from .contract.task import Setting as Setting
    from .contract.task import Task as Task
    from .contract.wrapper import Wrapper as Wrapper
    from .errors import BadInput as BadInput
    from .errors import KvbenchError as KvbenchError
    from .errors import PluginError as PluginError
    from .errors import UnknownName as UnknownName
    from .errors import UnsupportedModel as UnsupportedModel
    from .study.config import RunConfig as RunConfig
    from .study.runner import RunResult as RunResult
    from .study.runner import run as run

__version__ = "0.1.0"

HOMES = {
    "contract.attention_sums": ("attention_rows", "streamed_sums"),
    "contract.calibrated": ("Calibrated",),
    "contract.calibration": ("Calibration", "load_calibration", "write_calibration"),
    "contract.identity": ("fingerprint",),
    "contract.metrics": ("Metric", "add_metric"),
    "contract.model_description": ("ModelDescription",),
    "contract.need": ("Need",),
    "contract.observation": ("Observation",),
    "contract.pins": ("Pins",),
    "contract.policy": ("Policy", "TrainedFor", "param"),
    "contract.quadratic": ("quadratic", "weighted_gram"),
    "contract.registry": ("register", "register_task"),
    "contract.second_pass": ("ContextText", "Reading", "SecondPass"),
    "contract.task": ("Answer", "Sample", "Samples", "Setting", "Task"),
    "contract.wrapper": ("Wrapper",),
    "errors": ("BadInput", "KvbenchError", "PluginError", "UnknownName", "UnsupportedModel"),
    "study.config": ("RunConfig",),
    "study.runner": ("RunResult", "run"),
}  # public name -> the module that defines it, for imports on first use
_HOME = {name: home for home, names in HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvbench' has no attribute '{name}'")
    found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
