"""A real browser for pages: Chromium without a window, driven by the DevTools protocol over a pair of pipes."""

import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "these tests look at pages in Chromium: install it (Debian, Ubuntu: apt-get install chromium)"
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_READS, _WRITES = 3, 4  # the descriptors that Chromium uses


def find() -> str | None:
    """The browser's program; None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


@dataclass
class Browser:
    """One tab. `faults`: errors of the console, exceptions and requests that left the page's own file."""

    commands: int
    replies: int
    faults: list[str] = field(default_factory=list)
    _count: int = 0
    _session: str | None = None
    _rest: bytes = b""
    _loaded: bool = False

    def open(self, page: Path, *, width: int = 1200, scheme: str = "light") -> None:
        """Show a file in a window of this width, with light or dark colours, and wait until it is loaded."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._event(self._read())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def start(self) -> None:
        """Open the tab."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The reply to a command."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._count:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self._event(found)

    def _event(self, message: dict[str, Any]) -> None:
        found = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.faults.append(found["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if found["type"] in ("error", "warning"):
                self.faults.append(str(found["args"]))
            case "Log.entryAdded" if found["entry"]["level"] in ("error", "warning"):
                self.faults.append(found["entry"]["text"])
            case "Network.requestWillBeSent" if not found["request"]["url"].startswith(("file:", "data:")):
                self.faults.append(f"requested {found['request']['url']}")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.replies], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self.replies, 1 << 16)
            assert more, "the browser ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found


@contextmanager
def running(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile."""
    theirs_in, ours_out = map(_high, os.pipe())
    ours_in, theirs_out = map(_high, os.pipe())

    def connect() -> None:
        os.dup2(theirs_in, _READS)
        os.dup2(theirs_out, _WRITES)

    process = subprocess.Popen(
        [program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(_READS, _WRITES),
        preexec_fn=connect,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    browser = Browser(ours_out, ours_in)
    try:
        browser.start()
        yield browser
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)


def _high(descriptor: int) -> int:
    """A copy of a descriptor above those that the browser uses."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy
