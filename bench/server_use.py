"""What the processes of a server on this machine take of its processors, and where it sent the prompts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from server import descendants, frontend_process, processor_s

from radixkv.client.http import HTTPClient

_PLACEMENTS = "radixkv:replica_placements"


@dataclass(frozen=True)
class ServerUse:
    """Totals since the start of the server."""

    frontend_s: float
    """Processor time of the frontend's process."""
    loop_s: float
    """That of the thread with its event loop, among it."""
    runtimes_s: tuple[float, ...]
    """Processor time of each runtime, with that of its ranks; in the order of their starts."""
    placed: Mapping[tuple[str, str], int]
    """Prompts by replica and reason; empty with one replica."""

    @classmethod
    async def now(cls, address: str) -> ServerUse:
        """Reads the totals of the server at a local address."""
        pid = await asyncio.to_thread(frontend_process, address)
        runtimes = [[child, *descendants(child)] for child in descendants(pid, deep=False)]
        async with HTTPClient(address) as client:
            placed = placements((await client.request("GET", "/metrics")).decode())
        return cls(
            processor_s(f"/proc/{pid}"),
            processor_s(f"/proc/{pid}/task/{pid}"),
            tuple(sum(processor_s(f"/proc/{one}") for one in each) for each in runtimes),
            placed,
        )

    def since(self, before: ServerUse, duration_s: float, n_tokens: int) -> dict[str, Any]:
        """Returns what a result line says of the time since ``before``.

        Args:
            before: an earlier reading.
            duration_s: for how long the server had work meanwhile, in seconds.
            n_tokens: that it has generated meanwhile.
        """
        frontend_s, loop_s = self.frontend_s - before.frontend_s, self.loop_s - before.loop_s
        runtimes_s = [now - then for now, then in zip(self.runtimes_s, before.runtimes_s, strict=True)]
        grown = {key: count - before.placed.get(key, 0) for key, count in self.placed.items()}
        placed: dict[str, dict[str, int]] = {}
        for (replica, reason), count in grown.items():
            placed.setdefault(replica, {}).update({reason: count} if count else {})
        return {
            "processor": {
                "frontend_s": round(frontend_s, 2),
                "frontend_loop_s": round(loop_s, 2),
                "frontend_loop_pct": round(100 * loop_s / duration_s, 1),
                "frontend_us_per_token": round(1e6 * frontend_s / n_tokens, 1),
                "runtimes_s": [round(one, 2) for one in runtimes_s],
                "runtimes_pct": [round(100 * one / duration_s, 1) for one in runtimes_s],
            },
            "placements": placed,
        }


def placements(metrics: str) -> dict[tuple[str, str], int]:
    """Returns how many prompts each replica got, by replica and reason, from a server's metrics."""
    placed: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(metrics):
        if family.name == _PLACEMENTS:
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    placed[sample.labels["replica"], sample.labels["reason"]] += round(sample.value)
    return dict(placed)
