"""A headless Chromium, driven over the DevTools protocol, for the dashboard's tests."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from serve_process import poll
from websockets.sync.client import connect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
        "--mute-audio",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-default-apps",
    ),
    *("--remote-debugging-port=0", "--remote-allow-origins=*"),
]


class NoBrowser(Exception):
    """There is no Chromium, or only a stub of a package that is not installed."""


class Browser:
    """`folder` must be empty: it becomes the profile."""

    def __init__(self, folder: Path) -> None:
        if CHROMIUM is None:
            raise NoBrowser("no chromium here (Debian: apt install chromium)")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port_file = folder / "DevToolsActivePort"
        poll(lambda: port_file.exists() or self.process.poll() is not None, 60, "Chromium's port")
        if not port_file.exists():
            raise NoBrowser(f"{CHROMIUM} ends at once, with status {self.process.returncode}")
        port = poll(lambda: port_file.read_text().partition("\n")[0])
        self.tabs = f"http://127.0.0.1:{port}/json"

    def tab(self, url: str, **screen: Any) -> Tab:
        found = httpx.put(f"{self.tabs}/new?about:blank", trust_env=False).json()
        return Tab(found["webSocketDebuggerUrl"], url, **screen)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


class Tab:
    """One page. `problems`: its uncaught errors, console errors and failed requests so far."""

    def __init__(
        self,
        debugger: str,
        url: str,
        width: int = 1440,
        height: int = 900,
        features: Sequence[str] = (),
    ) -> None:
        """`features`: media features such as "prefers-color-scheme: dark"."""
        self._open = contextlib.ExitStack()
        self._socket = self._open.enter_context(connect(debugger, max_size=None))
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        self.requested_urls: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1 if width > 600 else 2,
            mobile=width < 600,
        )
        pairs = [feature.split(": ") for feature in features]
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": name, "value": value} for name, value in pairs],
        )
        self.send("Page.navigate", url=url)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested_urls.append(params["request"]["url"])

    # ------------------------------------------------------------ looking and doing

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        got = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def text(self, id: str) -> str:
        return self.run(f"document.getElementById({json.dumps(id)})?.textContent ?? ''")

    def until(self, expression: str, seconds: float = 20) -> Any:
        return poll(lambda: self.run(f"Boolean({expression})"), seconds, expression)

    def click(self, id: str) -> None:
        """Clicks the middle of the element with the mouse."""
        x, y = self.run(
            f"""(() => {{ const e = document.getElementById({json.dumps(id)});
            e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2] }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, **more: Any) -> None:
        codes = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9), "/": ("/", 191)}
        text, code = codes[key]
        about = {"key": key, "windowsVirtualKeyCode": code, **more}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self, path: Path, whole: bool = False) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def wait(self, seconds: float) -> None:
        """Waits, then reads the page's pending events."""
        time.sleep(seconds)
        self.run("0")

    def close(self) -> None:
        self.send("Page.close")
        self._open.close()
