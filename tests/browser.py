"""Drive a real headless browser in tests of pages; the tests skip themselves where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
)


class Page:
    """A page driven over Chromium's debugging protocol on a pair of pipes.

    console: messages of the page, uncaught exceptions and the browser's complaints (a missing
    file, a violated Content-Security-Policy) since the last `open`.
    """

    def __init__(self, profile: Path):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        command = [str(CHROMIUM), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # it wants 3 and 4
        redirect = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command]
        self._process = subprocess.Popen(
            redirect, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        for theirs in (theirs_in, theirs_out):
            os.close(theirs)
        # messages end with a zero byte, which reads do not respect
        self._in, self._out, self._rest, self._calls = ours_in, ours_out, b"", 0
        self._session: dict[str, str] = {}
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol; RuntimeError where the browser refuses it."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError(f"the browser has ended with status {self._process.wait()}")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(
                " ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"])
            )
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded":
            self.console.append(
                f"{params['entry']['text']} {params['entry'].get('url', '')}".strip()
            )

    def open(self, address: str) -> None:
        """Navigate and wait until the page has loaded."""
        self.console.clear()
        # the browser answers before it replaces the document: without this mark a slow machine
        # goes on with the old one, and what is typed into it is lost
        self.run("void (document.isLeft = true)")
        self.call("Page.navigate", url=address)
        self.until("!document.isLeft && document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """Return a JavaScript expression's value, awaited if a promise; RuntimeError on a throw."""
        outcome = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in outcome:
            raise RuntimeError(
                f"{expression}: {outcome['exceptionDetails']['exception'].get('description')}"
            )
        return outcome["result"].get("value")

    def until(self, expression: str, limit_s: float = 120) -> None:
        end = time.monotonic() + limit_s
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < end, (
                f"not within {limit_s} s: {expression}; console: {self.console}"
            )
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        # into what has the focus
        self.call("Input.insertText", text=text)

    def press(self, key: str, text: str = "", modifiers: int = 0) -> None:
        """Press a key, by its KeyboardEvent.key name; `text`: what it writes."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38}.get(key, ord(key[0]))
        both = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **both, **({"text": text} if text else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def close(self) -> None:
        self._session = {}
        self.call("Browser.close")
        self._process.wait(20)
        for ours in (self._in, self._out):
            os.close(ours)
