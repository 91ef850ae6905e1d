"""A Chromium without a window, driven over a pipe by its DevTools protocol."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ABOVE = 16  # descriptors that are nobody's
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATH = next((found for name in NAMES if (found := shutil.which(name))), None)
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "about:blank",
)


class Fault(Exception):
    """What a script of the page threw."""


class Page:
    """One tab.  events: what the browser has said of it, in order."""

    def __init__(self, write: int, read: int) -> None:
        self._write = write
        self._read = os.fdopen(read, "rb")
        self._rest = b""
        self._num_asked = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        (target,) = [
            each for each in self._ask("Target.getTargets")["targetInfos"] if each["type"] == "page"
        ]
        attached = {"targetId": target["targetId"], "flatten": True}
        self._session = self._ask("Target.attachToTarget", **attached)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self._ask("Runtime.evaluate", expression=script, **how)
        if "exceptionDetails" in found:
            raise Fault(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression holds; pytest's timeout ends what never comes."""
        look = f"if ({condition}) done(true); else setTimeout(look, 20)"
        self.run(f"new Promise((done) => {{ const look = () => {{ {look}; }}; look(); }})")

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self._ask("Input.insertText", text=text)

    def press(self, key: str, *, modifiers: int = 0) -> None:
        """A key by its name; modifiers: 2 for Ctrl."""
        codes = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
                 "ArrowDown": 40, "Tab": 9, "Home": 36, "End": 35}  # fmt: skip
        how = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, **how)

    def media(self, **features: str) -> None:
        """As prefers_color_scheme="dark"."""
        told = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        self._ask("Emulation.setEmulatedMedia", features=told)

    def size(self, width: int, height: int, *, scale: float = 1.0, mobile: bool = False) -> None:
        how = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self._ask("Emulation.setDeviceMetricsOverride", **how)

    def shot(self, path: Path) -> None:
        """A picture of what is seen, in the format of its name: png or webp."""
        how = {"format": path.suffix[1:]} | ({} if path.suffix == ".png" else {"quality": 80})
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", **how)["data"]))

    def said(self, method: str) -> list[dict[str, Any]]:
        """What the browser has said of one kind."""
        self.run("0")  # what was on its way has come
        return [each["params"] for each in self.events if each["method"] == method]

    def close(self) -> None:
        self._read.close()
        os.close(self._write)

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_asked += 1
        asked: dict[str, Any] = {"id": self._num_asked, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._num_asked:
                if "error" in found:
                    raise Fault(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            if "method" in found:
                self.events.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._read.read1()
            if not data:
                raise Fault("the browser has ended")
            self._rest += data
        told, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(told)
        return found


@contextmanager
def chromium() -> Iterator[Page]:
    """A tab of a browser of its own, with a profile of its own."""
    assert PATH is not None, "there is no Chromium on the path"
    (own_in, write), (read, own_out) = os.pipe(), os.pipe()
    theirs_in, theirs_out = (fcntl.fcntl(end, fcntl.F_DUPFD, _ABOVE) for end in (own_in, own_out))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads commands from descriptor 3 and writes to 4, whichever numbers the pipes have.
        line = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", line, PATH, *_FLAGS[:-1], f"--user-data-dir={profile}", _FLAGS[-1]],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (own_in, own_out, theirs_in, theirs_out):
            os.close(end)
        page = Page(write, read)
        try:
            yield page
        finally:
            page.close()
            process.terminate()
            process.wait()
