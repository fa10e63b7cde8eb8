"""Where work is done: in this process, or by workers elsewhere. Results come back one by one.

The runner cuts its work into independent jobs and hands them over with two functions: one makes what a
worker holds (a model), the other turns what it holds and a job into a result. Both, and the jobs, must
survive pickling where workers are other processes. Results do not depend on who computed them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from ..model.open import OpenModel


RAY_INSTALL = "pip install 'kvbench[ray]'"


Hold = Callable[[], Any]


Work = Callable[[Any, Any], Any]


Result = TypeVar("Result")


@dataclass(frozen=True)
class LostJob:
    """A job that no worker finished, because those who tried died. reason: in words, for a row."""

    reason: str


class Executor(ABC):
    """Computes jobs. peak: the most bytes that one of its processes had in use, as far as it knows."""

    name: ClassVar[str]
    peak: int = 0

    def check(self, kind: str, names: Iterable[str]) -> None:
        """Refuse what workers could not import. Raises BadInput."""
        return

    @abstractmethod
    def open(self, name: str, device: str, dtype: str) -> OpenModel:
        """Find a model for the devices that the work will run on. Raises as `open_model`."""

    @abstractmethod
    def compute(self, hold: Hold, work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(index, result or LostJob) of every job, in the order in which they finish.

        An error that `hold` or `work` raises is raised here.
        """

    def width(self) -> int:
        """How many jobs are in work at a time."""
        return 1

    def facts(self) -> dict[str, Any]:
        """How the work was done, for the manifest."""
        return {"executor": self.name}

    def close(self) -> None:
        """Let go of what was used; computing again takes it up again."""
        return

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Local(Executor):
    """One job after the other in this process."""

    name = "local"

    def open(self, name: str, device: str, dtype: str) -> OpenModel:
        from ..model.open import open_model

        return open_model(name, device, dtype)

    def compute(self, hold: Hold, work: Work, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        from ..model.memory import peak_bytes

        held = hold()
        for index, job in enumerate(jobs):
            yield index, work(held, job)
        self.peak = peak_bytes()


def in_order(results: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """Results by ascending index, each as soon as all before it are there."""
    waiting: dict[int, Result] = {}
    following = 0
    for index, result in results:
        waiting[index] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1
