"""A headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 30.0


def find_chromium() -> str:
    """Returns the path of the browser. Raises ``FileNotFoundError`` that says how to get one."""
    for name in NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    raise FileNotFoundError(
        f"no browser: none of {', '.join(NAMES)} is in PATH; `apt-get install chromium`, or your system's way"
    )


class Tab:
    """The one tab of a browser."""

    def __init__(self, runner: asyncio.Runner, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._runner = runner
        self._socket = socket
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        """Errors of scripts, of the console, and violations of the content security policy."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command; returns its result."""
        return self._runner.run(self._send(method, parameters))

    async def _send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        command = next(self._ids)
        await self._socket.send_json({"id": command, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(timeout=LIMIT_S)).data)
            if message.get("id") == command:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"), message.get("params"):
            case "Runtime.exceptionThrown", parameters:
                self.problems.append(json.dumps(parameters))
            case "Log.entryAdded", {"entry": {"level": "error", "text": text}}:
                self.problems.append(text)
            case "Runtime.consoleAPICalled", {"type": "error" | "assert"} as parameters:
                self.problems.append(json.dumps(parameters))

    def show(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Sets the size of the page in CSS pixels, and its colours."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Loads a page."""
        self.send("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; waits for a promise."""
        reply = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait(self, expression: str, accepts: Callable[[Any], bool] = bool) -> Any:
        """Evaluates an expression until its value is accepted; returns the value."""
        deadline = time.monotonic() + LIMIT_S
        while not accepts(value := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} is {value!r}"
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as PNG."""
        reply = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))


@contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """Runs a browser with one tab until the end of the context.

    Args:
        profile: an empty folder for the browser's files.
    """
    command = [find_chromium(), "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"]
    process = subprocess.Popen(
        [*command, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with asyncio.Runner() as runner:
            port = _wait_for_port(profile / "DevToolsActivePort", process)
            session = runner.run(_open_session())
            try:
                yield Tab(runner, runner.run(_connect(session, port)))
            finally:
                runner.run(session.close())
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def _wait_for_port(path: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and (lines := path.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise TimeoutError(f"Chromium opened no port; it ended with {process.poll()}")


async def _open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


async def _connect(session: aiohttp.ClientSession, port: int) -> aiohttp.ClientWebSocketResponse:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
        (page,) = [target for target in await reply.json() if target["type"] == "page"]
    return await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=1 << 26)
