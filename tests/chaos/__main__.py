"""Runs the driver: ``make test-chaos MINUTES=60 SEED=1``.

Clients send requests of all kinds to one real server on the CPU. One fault after another is drawn from the seed.
Each fault strikes under load. Then the load pauses, and the server must be as it was: every request has ended once
and in a way that the fault explains, the greedy answer of a canary is exact, all pages are free or evictable, and
open files, memory and disk are within their bounds. Appends one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import httpx
from result_lines import report

from chaos.clients import Clients
from chaos.clock import CLOCK_FILE
from chaos.endings import COMPLETE, LEFT, WrongEnding, unexpected
from chaos.faults import ENTRY, FAULTS, Fault
from chaos.world import ChaosFailed, World
from radixkv.lab.bench.environment import provenance
from support.sensitive_checkpoint import save_sensitive

ALWAYS = {COMPLETE, LEFT, "queue_full", *("invalid_request", "context_length_exceeded", "unsupported_feature")}
"""Endings that need no fault: the traffic has invalid requests."""
ENDED = {"kill_frontend", "terminate"}
"""Faults after which there is no server."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make test-chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME")
    parser.add_argument("--output-file", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends, too
    faults = [fault for fault in FAULTS if arguments.faults is None or fault.name in arguments.faults]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        os.environ[CLOCK_FILE] = str(Path(folder) / "clock")
        model = Path(folder) / "model"
        model.mkdir()
        save_sensitive(model)
        driver = Driver(World(model, Path(folder)), Random(arguments.seed))
        try:
            driver.run(faults, arguments.minutes * 60)
        except (ChaosFailed, WrongEnding, AssertionError, httpx.HTTPError) as error:
            log = driver.world.errors.read_text(errors="replace")[-4000:]
            print(
                f"{log}\nchaos: round {driver.n_rounds} of seed {arguments.seed}: {driver.fault}: {error!r}",
                file=sys.stderr,
            )
            return 1
        finally:
            driver.world.stop()
    report(arguments.output_file, {"case": "chaos", "seed": arguments.seed, **driver.line()}, provenance())
    return 0


class Driver:
    """Strikes a server with faults under load."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.n_rounds = 0
        self.fault = "no fault"
        self._rng = rng
        self._clients = Clients(Random(rng.random()))
        self._n_faults: Counter[str] = Counter()
        self._endings: Counter[str] = Counter()
        self._n_restarts = 0
        self._duration_s = 0.0

    def run(self, faults: Sequence[Fault], limit_s: float) -> None:
        """Strikes until the time is over; each fault comes once before any comes again."""
        started = time.monotonic()
        self.world.start(ENTRY)
        with self._clients.asking(self.world.live.base_url):
            time.sleep(10)
        self._count(set())
        self.world.remember()
        pending: list[Fault] = []
        while time.monotonic() - started < limit_s:
            if not pending:
                pending = self._rng.sample(faults, len(faults))
            self._round(pending.pop())
            self._duration_s = time.monotonic() - started

    def line(self) -> dict[str, object]:
        """Returns what was counted."""
        first, last = self.world.samples[0], self.world.samples[-1]
        return {
            "duration_s": round(self._duration_s, 1),
            "rounds": self.n_rounds,
            "faults": dict(sorted(self._n_faults.items())),
            "requests": self._endings.total(),
            "endings": dict(sorted(self._endings.items())),
            "kinds": dict(sorted(self._clients.kinds.items())),
            "server_starts": self.world.n_starts,
            "runtime_restarts": self._n_restarts,
            "growth_bytes": {name: last[name] - first[name] for name in first},
            "max_bytes": {name: max(sample[name] for sample in self.world.samples) for name in first},
        }

    def _round(self, fault: Fault) -> None:
        self.n_rounds += 1
        self.fault = fault.name
        self._n_faults[fault.name] += 1
        n_before = self.world.n_restarts
        with self._clients.asking(self.world.live.base_url):
            time.sleep(self._rng.uniform(0.5, 2.5))
            fault.strike(self.world, self._rng)
            time.sleep(self._rng.uniform(0.2, 1.5))
        self._n_restarts += self.world.n_restarts - n_before
        endings = self._count(set(fault.endings))
        if fault.name in ENDED:
            self.world.start(ENTRY)
        self.world.check_at_rest()
        self.world.check_request_log(has_fragments="disk" in fault.name)
        print(json.dumps({"round": self.n_rounds, "fault": fault.name, **endings}), flush=True)

    def _count(self, allowed: set[str]) -> Counter[str]:
        endings = self._clients.take_endings()
        self._endings += endings
        if wrong := unexpected(endings, ALWAYS | allowed):
            raise ChaosFailed(f"requests ended with {wrong}, among {dict(endings)}")
        return endings


if __name__ == "__main__":
    sys.exit(main())
