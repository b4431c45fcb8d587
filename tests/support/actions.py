"""What can happen to an engine, as single actions that a state machine or a random driver chains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from radixkv.config import SchedulerConfig
from radixkv.errors import QueueFull
from radixkv.runtime.request import GREEDY, Phase, Request
from radixkv.runtime.step.plan import RowSampling
from radixkv.tree.node import Namespace
from support.engine import Engine, name_of, token_bytes
from support.fake_device import unpacked

PLAIN = replace(GREEDY, temperature=1.0, seed=3)
PENALISED = replace(PLAIN, frequency_penalty=0.5, n_logprobs=1)
QUEUE_TIMEOUT_S = 10.0
NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"))


@dataclass(frozen=True)
class Ask:
    """What a request wants beside its tokens."""

    max_tokens: int = 4
    namespace: int = 0
    reads_cache: bool = True
    n: int = 1
    min_tokens: int = 0
    sampling: RowSampling = GREEDY
    priority: int = 0
    scores_prompt: bool = False


class Actions:
    """An engine with a small pool, and the sequences that were seen in it."""

    def __init__(self, n_pages: int = 24, page_size: int = 4, *, policy: str = "lpm", shares: bool = True) -> None:
        config = SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=24,
            schedule_policy="lpm" if policy == "lpm" else "fcfs",
            max_queued_requests=16,
            lpm_max_passes=3,
            queue_timeout_s=QUEUE_TIMEOUT_S,
        )
        self.engine = Engine(n_pages, page_size, config, shares=shares)
        self.known: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]

    @property
    def live(self) -> list[Request]:
        return [request for name, request in self.engine.requests.items() if name not in self.engine.ended]

    def add(self, base: int, cut: int, suffix: Sequence[int], ask: Ask, *, twice: bool) -> None:
        """A prefix of something seen, and a suffix; random prompts alone would miss every hit."""
        sequence = self.known[base % len(self.known)]
        prompt = (sequence[: cut % (len(sequence) + 1)] + list(suffix))[:40] or [1]
        for _ in range(2 if twice else 1):
            try:
                self.engine.add(
                    prompt,
                    ask.max_tokens,
                    namespace=NAMESPACES[ask.namespace % len(NAMESPACES)],
                    reads_cache=ask.reads_cache,
                    stop=(107, 111, 205),
                    n=ask.n,
                    sampling=ask.sampling,
                    min_tokens=min(ask.min_tokens, ask.max_tokens),
                    priority=ask.priority,
                    n_prompt_logprobs=0 if ask.scores_prompt else None,
                )
            except QueueFull:
                return
            self.known = [*self.known, prompt][-12:]

    def launch(self) -> None:
        if len(self.engine.pending) < 2:
            self.engine.launch()

    def collect(self) -> None:
        if self.engine.pending:
            for update in self.engine.collect():
                if update.finish_reason is not None:
                    self.known = [*self.known, unpacked(bytes(update.request.tokens))][-12:]

    def abort(self, which: int, *, whole: bool) -> None:
        """One choice, or all of its request, the last first."""
        live = self.live
        if live:
            request = live[which % len(live)]
            for choice in reversed(self.engine.siblings[request.id]) if whole else (request,):
                if name_of(choice) not in self.engine.ended:
                    self.engine.abort(choice)

    def wait(self) -> None:
        """So long that who waits for a first step has waited too long, if nobody looks at it before."""
        self.engine.now += 0.6 * QUEUE_TIMEOUT_S
        self.engine.expire()
        waiting = (request for request in self.engine.scheduler.waiting if request.scheduled_at is None)
        assert all(self.engine.now - request.received_at <= QUEUE_TIMEOUT_S for request in waiting)
        for name, ended in self.engine.ended.items():
            if ended.reason == "queue_timeout":
                assert self.engine.requests[name].scheduled_at is None

    def fail(self) -> None:
        """The next launched step will fail."""
        if self.engine.pending:
            self.engine.device.fail_steps.add(self.engine.pending[0][0].step)

    def refuse(self) -> None:
        """The next launch will raise."""
        self.engine.device.refuse_launches = 1

    def make_nan(self, which: int, *, kv: bool) -> None:
        """The next row of a running request is not finite, with or without its KV."""
        running = list(self.engine.scheduler.running)
        if running:
            batch_slot = running[which % len(running)].batch_slot
            (self.engine.device.nan_slots if kv else self.engine.device.nan_logits_slots).add(batch_slot)

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
        self.engine.scheduler.max_num_batched_tokens = n_tokens

    def retract(self, which: int) -> None:
        """As for want of pages."""
        scheduler = self.engine.scheduler
        if len(scheduler.running) > 1:
            victim = list(scheduler.running)[which % len(scheduler.running)]
            if victim.phase is Phase.RUNNING:
                scheduler.running.requeue(victim, discards_results=False)
                scheduler.running.release()
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
        page_size=rng.choice((1, 2, 4)),
        n_pages=rng.choice((20, 40)) * 2,
        policy=rng.choice(("lpm", "fcfs")),
        shares=rng.random() < 0.9,
    )
    for _ in range(n_actions):
        kind = rng.random()
        if kind < 0.22:
            ask = Ask(
                max_tokens=rng.randrange(1, 12),
                namespace=rng.choice((0, 0, 0, 1, 2)),
                reads_cache=rng.random() < 0.85,
                n=rng.choice((1, 1, 2, 3)),
                min_tokens=rng.choice((0, 0, 3, 6)),
                sampling=rng.choice((GREEDY, PLAIN, PENALISED)),
                priority=rng.choice((0, 0, 0, -1, 1)),
                scores_prompt=rng.random() < 0.2,
            )
            suffix = [rng.randrange(1, 5) for _ in range(rng.randrange(6))]
            actions.add(rng.randrange(12), rng.randrange(40), suffix, ask, twice=rng.random() < 0.3)
        elif kind < 0.51:
            actions.launch()
        elif kind < 0.79:
            actions.collect()
        elif kind < 0.84:
            actions.abort(rng.randrange(8), whole=rng.random() < 0.4)
        elif kind < 0.86:
            actions.fail()
        elif kind < 0.87:
            actions.refuse()
        elif kind < 0.89:
            actions.make_nan(rng.randrange(8), kv=rng.random() < 0.5)
        elif kind < 0.91:
            actions.evict(rng.randrange(1, 6))
        elif kind < 0.92:
            actions.wait()
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
