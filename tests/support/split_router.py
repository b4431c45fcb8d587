"""The router of the recipe for a prefill and a decode server, as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from support.live import LIMIT_S
from support.paths import ROOT


@contextmanager
def routing(prefill: str, decode: str) -> Iterator[httpx.Client]:
    """Runs the router of the recipe; yields a client of it."""
    command = [sys.executable, str(ROOT / "deploy" / "split" / "router.py"), "--port", "0", "--min-tokens", "100"]
    command += ["--prefill", prefill, "--decode", decode]
    router = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = router.stdout.readline()
        assert line.startswith("ready on "), line
        with httpx.Client(base_url=line.split()[2], timeout=LIMIT_S) as client:
            yield client
    finally:
        router.kill()
        router.wait(timeout=LIMIT_S)
        router.stdout.close()
