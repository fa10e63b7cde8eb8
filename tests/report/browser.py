"""A headless Chromium, spoken to through a pipe (its DevTools protocol): no driver and no package needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
REQUIRED = "KVBENCH_BROWSER"  # set to "required" where a missing browser is a failure
PATIENCE = 120  # seconds without any message, before giving up
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowRight": 39}


def installed() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page in one browser. events: everything it said, in order."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs, self._out = os.pipe()
        self._in, ours = os.pipe()
        command = [
            program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        script = f'exec "$@" 3<&{theirs} 4>&{ours}'  # where it expects the pipe
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command], pass_fds=(theirs, ours), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(ours)
        self._rest = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        """Call a method and wait for its answer. Raises: RuntimeError with the browser's error."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def open(self, url: str) -> None:
        self.events.clear()
        self.ask("Page.navigate", url=url)
        until = time.monotonic() + PATIENCE
        while self.value("document.readyState") != "complete" or self.value("location.href") != url:
            if time.monotonic() > until:
                raise RuntimeError(f"{url} does not load")
            time.sleep(0.02)

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives. Raises: RuntimeError where it throws."""
        done = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        """A page so many CSS pixels wide, as on a phone or a desk."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **shape)

    def media(self, media: str = "screen", scheme: str = "light") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def press(self, key: str) -> None:
        text = {" ": " ", "Enter": "\r"}.get(key, "")
        code = {"code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, **code)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
