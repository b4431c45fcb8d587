"""The subscriber of docs/events.md, as a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.live import wait_for
from support.paths import ROOT


def event_flags(endpoints: tuple[str, str], **fields: object) -> tuple[str, str]:
    """Returns the flags that publish events at an endpoint, with replays at the other one."""
    config = {"enable_kv_cache_events": True, "endpoint": endpoints[0], "replay_endpoint": endpoints[1], **fields}
    return "--kv-events-config", json.dumps(config)


@dataclass
class Lines:
    """What a subscriber prints while it runs."""

    path: Path

    def counts(self) -> dict[str, int]:
        """Returns the pages of each tier after the last batch."""
        last = self.path.read_text().splitlines()[-1]
        return {name: int(n_pages) for name, n_pages in re.findall(r"(\w+)=(\d+)", last)}

    def numbers(self) -> list[int]:
        return [int(number) for number in re.findall(r"^(\d+) ", self.path.read_text(), re.M)]


@contextmanager
def following(endpoints: tuple[str, str], folder: Path) -> Iterator[Lines]:
    """Runs the subscriber of the documentation."""
    (program,) = re.findall(
        r"^```python\n(import sys.*?)^```$", (ROOT / "docs" / "events.md").read_text(), re.M | re.S
    )
    output = folder / f"lines{len(list(folder.iterdir()))}"
    with output.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", program, *endpoints], stdout=file)
        try:
            wait_for(lambda: "following" in output.read_text(), "the subscriber does not start")
            yield Lines(output)
        finally:
            process.kill()
            process.wait()
