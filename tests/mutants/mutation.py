"""One thing that is broken on purpose."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """law: number of the law, or what kind of fault. broken: what is wrong then, in words.

    file: from the root of the repository. old: the text that is replaced, found there once. new: what stands
    there instead. tests: "laws/test_x.py::test_y", each of which must fail.
    """

    law: str
    broken: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def test_paths(self) -> list[str]:
        return [f"tests/{test}" for test in self.tests]

    def fault(self, root: Path) -> str:
        """Why it does not apply to the code as it is, or ""."""
        path = root / self.file
        found = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        if found != 1:
            return f"its text is {found} times in {self.file}"
        if self.old == self.new:
            return "it changes nothing"
        for test in self.test_paths:
            file, _, name = test.partition("::")
            code = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
            if not re.search(rf"^def {name}\(", code, re.M):
                return f"there is no test {test}"
        return ""

    def apply(self, root: Path) -> str:
        """Break the code; returns the whole text of the file before."""
        path = root / self.file
        before = path.read_text(encoding="utf-8")
        path.write_text(before.replace(self.old, self.new), encoding="utf-8")
        return before

    def state(self, root: Path) -> str:
        """Identity of the mutation with the files it concerns: an outcome holds as long as it is the same."""
        files = {self.file, *(test.partition("::")[0] for test in self.test_paths)}
        digest = hashlib.sha256(repr(self).encode())
        for file in sorted(files):
            digest.update((root / file).read_bytes())
        return digest.hexdigest()[:16]


def mutation(law: str, broken: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(law, broken, file, old, new, tests)
