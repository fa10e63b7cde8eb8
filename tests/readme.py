"""Runs what the documents say, word for word, in a fresh clone: blocks marked `sh`, and `python` ones.

    python tests/readme.py [FILE...]      # default: README.md, then docs/*.md

Blocks follow each other in one shell, as a reader would type them, so what one block makes the next one
finds. The shell stops at the first command that fails, and so does this command, with its exit code. Blocks
marked `text` need something else (another model, a cluster, data of your own) and are only counted.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """(mark, code) of every fenced block."""
    return BLOCK.findall(text)


def script(text: str) -> list[str]:
    """The lines of the shell that runs a document: each command is told before it runs."""
    lines = ["set -eo pipefail"]
    for mark, code in blocks(text):
        if mark == "sh":
            for command in re.sub(r"\\\n\s*", " ", code).splitlines():
                told = command.split("  #")[0].strip()
                if told and not told.startswith("#"):
                    lines += [f"printf '\\n$ %s\\n' {shlex.quote(told)}", told]
        elif mark == "python":
            lines += [
                "printf '\\n$ python\\n'",
                f"cat > example.py <<'PYTHON'\n{code}PYTHON",
                "python example.py",
            ]
    return lines


def main() -> int:
    files = [ROOT / name for name in sys.argv[1:]]
    files = files or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    marks = [mark for mark, _ in blocks(text)]
    runs = marks.count("sh") + marks.count("python")
    print(f"{runs} blocks to run, {marks.count('text')} examples that are not run", flush=True)
    if not marks.count("sh"):
        print("nothing to run: mark blocks with ```sh", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        return subprocess.run(["bash", "-c", "\n".join(script(text))], cwd=folder).returncode


if __name__ == "__main__":
    raise SystemExit(main())
