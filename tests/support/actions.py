"""What can happen to an engine, as single actions that a state machine or a random driver chains."""

from __future__ import annotations

import random
from collections.abc import Sequence

from radixkv.config import SchedulerConfig
from radixkv.errors import QueueFull
from radixkv.runtime.request import Phase, Request
from radixkv.tree.node import Namespace
from support.engine import Engine, token_bytes

NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"))


class Actions:
    """An engine with a small pool, and the sequences that were seen in it."""

    def __init__(self, n_pages: int = 24, page_size: int = 4, *, policy: str = "lpm") -> None:
        config = SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=24,
            schedule_policy="lpm" if policy == "lpm" else "fcfs",
            max_queued_requests=16,
            lpm_max_passes=3,
        )
        self.engine = Engine(n_pages, page_size, config)
        self.known: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]

    @property
    def live(self) -> list[Request]:
        return [r for r in self.engine.requests.values() if r.id not in self.engine.ended]

    def add(
        self, base: int, cut: int, suffix: Sequence[int], max_tokens: int, namespace: int, reads: bool, twice: bool
    ) -> None:
        """A prefix of something seen, and a suffix; random prompts alone would miss every hit."""
        sequence = self.known[base % len(self.known)]
        prompt = (sequence[: cut % (len(sequence) + 1)] + list(suffix))[:40] or [1]
        for _ in range(2 if twice else 1):
            try:
                self.engine.add(
                    prompt,
                    max_tokens,
                    namespace=NAMESPACES[namespace % len(NAMESPACES)],
                    reads_cache=reads,
                    stop=(107, 111, 205),
                )
            except QueueFull:
                return
            self.known = [*self.known, prompt][-12:]

    def launch(self) -> None:
        if len(self.engine.pending) < 2:
            self.engine.launch()

    def collect(self) -> None:
        if self.engine.pending:
            updates = self.engine.collect()
            for request, _, reason, _ in updates:
                if reason is not None:
                    sequence = bytes(request.tokens)
                    ids = [int.from_bytes(sequence[i : i + 4], "little") for i in range(0, len(sequence), 4)]
                    self.known = [*self.known, ids][-12:]

    def abort(self, which: int) -> None:
        live = self.live
        if live:
            self.engine.abort(live[which % len(live)])

    def fail(self) -> None:
        """The next launched step will fail."""
        if self.engine.pending:
            self.engine.device.fail_steps.add(self.engine.pending[0][0].step)

    def refuse(self) -> None:
        """The next launch will raise."""
        self.engine.device.refuse_launches = 1

    def make_nan(self, which: int, *, kv: bool) -> None:
        """The next row of a running request is not finite, with or without its KV."""
        running = self.engine.scheduler._running
        if running:
            slot = running[which % len(running)].slot
            (self.engine.device.nan_slots if kv else self.engine.device.nan_logits_slots).add(slot)

    def evict(self, n_pages: int) -> None:
        """Pressure from outside, as a tier would make it."""
        cache = self.engine.cache
        for run in cache.tree.evict(n_pages):
            cache._free += run.pages
        self.engine.after()

    def flush(self) -> None:
        self.engine.cache.flush()
        self.engine.after()

    def detach(self, base: int, cut: int, namespace: int) -> None:
        sequence = self.known[base % len(self.known)]
        prefix = token_bytes(sequence[: cut % (len(sequence) + 1)])
        cache = self.engine.cache
        cache._free += cache.tree.detach(NAMESPACES[namespace % len(NAMESPACES)], prefix)
        self.engine.after()

    def set_budget(self, n_tokens: int) -> None:
        self.engine.scheduler._max_tokens = n_tokens

    def retract(self, which: int) -> None:
        """As for want of pages."""
        scheduler = self.engine.scheduler
        if len(scheduler._running) > 1:
            victim = scheduler._running[which % len(scheduler._running)]
            if victim.phase is Phase.RUNNING:
                victim.returned = True
                scheduler._requeue(victim, discards=False)
                scheduler._drain()
                self.engine.after()

    def finish(self) -> None:
        """Runs to the end, then looks at everything."""
        self.engine.device.fail_steps.clear()
        self.engine.run()
        self.engine.check_answers()
        self.engine.check_quarantine()
        self.engine.check_idle()


def drive(seed: int, n_actions: int = 60) -> None:
    """A random history, the same for the same seed."""
    rng = random.Random(seed)
    actions = Actions(
        page_size=rng.choice((1, 2, 4)), n_pages=rng.choice((20, 40)) * 2, policy=rng.choice(("lpm", "fcfs"))
    )
    for _ in range(n_actions):
        kind = rng.random()
        if kind < 0.22:
            actions.add(
                rng.randrange(12),
                rng.randrange(40),
                [rng.randrange(1, 5) for _ in range(rng.randrange(6))],
                rng.randrange(1, 12),
                rng.choice((0, 0, 0, 1, 2)),
                rng.random() < 0.85,
                rng.random() < 0.3,
            )
        elif kind < 0.52:
            actions.launch()
        elif kind < 0.80:
            actions.collect()
        elif kind < 0.84:
            actions.abort(rng.randrange(8))
        elif kind < 0.86:
            actions.fail()
        elif kind < 0.87:
            actions.refuse()
        elif kind < 0.89:
            actions.make_nan(rng.randrange(8), kv=rng.random() < 0.5)
        elif kind < 0.92:
            actions.evict(rng.randrange(1, 6))
        elif kind < 0.95 and seed % 3 == 0:
            actions.make_nan(rng.randrange(8), kv=rng.random() < 0.7)
        elif kind < 0.93:
            actions.flush()
        elif kind < 0.95:
            actions.detach(rng.randrange(12), rng.randrange(40), rng.randrange(3))
        elif kind < 0.97:
            actions.set_budget(rng.choice((8, 12, 24)))
        else:
            actions.retract(rng.randrange(8))
    actions.finish()
