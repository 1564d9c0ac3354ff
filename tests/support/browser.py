"""Drive a headless Chromium by its DevTools protocol, over a pair of pipes: no port and no other package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.needs import need_tool
from tests.support.waiting import wait_until

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = requests
        self._replies = replies
        self._rest = b""
        self._last_id = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._last_id:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def _read(self, timeout_s: float = 30.0) -> dict[str, Any]:
        while b"\0" not in self._rest:
            readable, _, _ = select.select([self._replies], [], [], timeout_s)
            assert readable, "the browser does not answer"
            block = os.read(self._replies, 1 << 20)
            assert block, "the browser has ended"
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def text(self, selector: str = "body") -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_for(self, script: str, timeout_s: float = 20.0) -> Any:
        """Wait until a script's value is true, and return it."""
        return wait_until(
            lambda: self.evaluate(script), timeout_s, why=lambda: f"{script}\n{self.text()[:2000]}", every_s=0.1
        )

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1, buttons=1)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def set_scheme(self, scheme: str) -> None:
        """Choose the `light` or the `dark` colours."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, **options: Any) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))


@contextlib.contextmanager
def open_browser() -> Iterator[Page]:
    """Start a browser with an empty profile, and end it."""
    program = need_tool("chromium", "chromium-browser", "google-chrome")
    profile = tempfile.mkdtemp(prefix="shoal-browser-")
    (its_requests, requests), (replies, its_replies) = os.pipe(), os.pipe()

    def place_pipes() -> None:
        # Chromium reads from descriptor 3 and writes to 4. Neither may be overwritten before it is copied.
        copies = os.dup(its_requests), os.dup(its_replies)
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)

    browser = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        close_fds=False, preexec_fn=place_pipes, start_new_session=True,
    )  # fmt: skip
    os.close(its_requests)
    os.close(its_replies)
    try:
        page = Page(requests, replies)
        yield page
        page._session = None
        with contextlib.suppress(AssertionError, OSError):
            page.call("Browser.close")
    finally:
        os.close(requests)
        os.close(replies)
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
        shutil.rmtree(profile, ignore_errors=True)
