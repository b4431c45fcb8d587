"""What the processes of a server on this machine take of its processors, and where it sent the prompts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from server import descendants, frontend_process, processor_s

from radixkv.client.http import HTTPClient

_PLACEMENTS = "radixkv:replica_placements"
_INTERVAL_S = 0.2


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
        return (await _read(address))[0]

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


def memory(address: str) -> dict[str, Any]:
    """Returns the host memory of the server at a local address, in bytes, of each process and of all.

    ``anonymous`` is a process's own, ``shared`` what it maps of the memory that ranks share, and ``file`` of files,
    which the kernel may drop. ``limit`` is what a limit of the server has to hold at least: all anonymous memory,
    and the largest shared one.
    """
    pid = frontend_process(address)
    found = [_memory_of(one) for one in (pid, *descendants(pid))]
    limit = sum(one["anonymous"] for one in found) + max(one["shared"] for one in found)
    return {"frontend": found[0], "runtimes": found[1:], "limit": limit}


def _memory_of(pid: int) -> dict[str, int]:
    names = {"RssAnon": "anonymous", "RssShmem": "shared", "RssFile": "file"}
    lines = map(str.split, Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines())
    return dict.fromkeys(names.values(), 0) | {
        names[key]: 1024 * int(words[1]) for words in lines if (key := words[0].rstrip(":")) in names
    }


class Timeline:
    """What a server does from moment to moment, for a run of a few seconds.

    Args:
        address: of a server on this machine.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._samples: list[tuple[float, ServerUse, _Gauges]] = []
        self._task = asyncio.create_task(self._sample())

    async def stop(self, began: float) -> dict[str, Any]:
        """Ends it; returns a column of values for each measured thing, with a value for each moment.

        ``pct`` is the processor time since the moment before. Those of a replica that does not answer are None.

        Args:
            began: the start of the run, as a value of ``time.perf_counter``.
        """
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        pairs = list(itertools.pairwise(self._samples))
        return {
            "at_s": [round(now[0] - began, 2) for _, now in pairs],
            "frontend_loop_pct": [
                round(100 * (now[1].loop_s - then[1].loop_s) / (now[0] - then[0])) for then, now in pairs
            ],
            "runtimes_pct": [
                [
                    round(100 * (late - early) / (now[0] - then[0]))
                    for early, late in zip(then[1].runtimes_s, now[1].runtimes_s, strict=True)
                ]
                for then, now in pairs
            ],
            "running": [now[2].running for _, now in pairs],
            "waiting": [now[2].waiting for _, now in pairs],
            "generated": [now[2].generated for _, now in pairs],
            "placed": [sum(now[1].placed.values()) for _, now in pairs],
        }

    async def _sample(self) -> None:
        while True:
            use, gauges = await _read(self._address)
            self._samples.append((time.perf_counter(), use, gauges))
            await asyncio.sleep(_INTERVAL_S)


class _Gauges(NamedTuple):
    """Numbers of each replica, in their order."""

    running: list[int | None]
    waiting: list[int | None]
    generated: list[int | None]
    """Tokens since the start."""


async def _read(address: str) -> tuple[ServerUse, _Gauges]:
    async with HTTPClient(address) as client:
        metrics = (await client.request("GET", "/metrics")).decode()
    pid = await asyncio.to_thread(frontend_process, address)
    runtimes = [[child, *descendants(child)] for child in descendants(pid, deep=False)]
    use = ServerUse(
        processor_s(f"/proc/{pid}"),
        processor_s(f"/proc/{pid}/task/{pid}"),
        tuple(sum(processor_s(f"/proc/{one}") for one in each) for each in runtimes),
        placements(metrics),
    )
    names = ("num_requests_running", "num_requests_waiting", "generation_tokens")
    return use, _Gauges(*(_of_replicas(metrics, name) for name in names))


def _of_replicas(metrics: str, name: str) -> list[int | None]:
    """Returns the value of each replica, None of one that is down; that of the server if it has one replica."""
    families = {family.name: family for family in text_string_to_metric_families(metrics)}
    if (of_replicas := families.get(f"radixkv:replica_{name}")) is None:
        total = families.get(f"radixkv:{name}")
        samples = [] if total is None else [one for one in total.samples if not one.name.endswith("_created")]
        return [round(sum(sample.value for sample in samples))]
    is_up = {sample.labels["replica"]: sample.value for sample in families["radixkv:replica_up"].samples}
    samples = [sample for sample in of_replicas.samples if not sample.name.endswith("_created")]
    return [round(sample.value) if is_up[sample.labels["replica"]] else None for sample in samples]


def placements(metrics: str) -> dict[tuple[str, str], int]:
    """Returns how many prompts each replica got, by replica and reason, from a server's metrics."""
    placed: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(metrics):
        if family.name == _PLACEMENTS:
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    placed[sample.labels["replica"], sample.labels["reason"]] += round(sample.value)
    return dict(placed)
