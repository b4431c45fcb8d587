"""What requests find whose adapters take turns in slots, and how two tenants share them, in virtual time.

Scheduler, queues and cache are the server's; a turn of the loop takes 0.1 s, and no device computes. Prints a JSON
line for each case:

    prefix     six adapters have one slot. In each of twelve bursts three requests of each come, whose prompts begin
               alike in all bursts, and the cache holds those of about four adapters. Requests are ordered by
               cached prefix (``lpm``), or by age (``fcfs``): the share of prompt tokens that is found.
    tenants    a tenant with six adapters and one with one, of equal weight, have one slot or two; requests for each
               adapter wait at any time. Turns are by the age of each line, as among the adapters of one sender, or
               by slot time: the share of tokens that is computed for the tenant with one adapter.

    python bench/adapter_turns.py --output-file bench/results/adapter_turns.jsonl
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count, product
from typing import Any

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.lab.simulator.virtual_time import Clock
from radixkv.runtime.adapters.slot_queue import SlotQueue
from radixkv.runtime.adapters.slots import AdapterSlots
from radixkv.runtime.assemble import open_scheduler, page_quotas
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.finished import wait_readable
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.request import ActiveAdapter, Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.step.result import StepResult
from radixkv.settings.config import SchedulePolicy
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import Namespace

TURN_S = 0.1
PAGE_SIZE = 4
N_ADAPTERS = 6
N_BURSTS = 12
N_EACH = 3
"""Requests of each adapter in a burst."""
COMMON_TOKENS = 48
"""With which the prompts of an adapter begin."""
N_WAITING = 9
"""Requests for each adapter that have not ended, in the case ``tenants``."""
ANSWER_TOKENS = 5
MANY, FEW = "many", "few"


class NoCopy:
    """A copy of an adapter that no device needs."""

    def fill(self) -> None:
        """Does nothing."""

    def put(self) -> None:
        """Does nothing."""

    def discard(self) -> None:
        """Does nothing."""


class NoDevice:
    """The adapters of no device."""

    def copy(self, digest: str) -> NoCopy:
        """Returns the copy of an adapter."""
        return NoCopy()

    def withdraw(self, digest: str) -> None:
        """Does nothing."""


class SlotsOfOneSender(AdapterSlots):
    """Slots in whose turns all requests are of one sender."""

    def open_queue(self, queue: Queue, weights: Mapping[str, float] | None = None) -> SlotQueue:
        """Returns the queue, which knows no weights."""
        return super().open_queue(queue)


class Run:
    """A server with adapters in slots.

    Args:
        slots: those of the adapters.
        clock: theirs.
        n_pages: those of the cache.
        n_rows: most rows of a step.
        policy: the order of admission.
        tenants: who sends requests; none: they are not told apart.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        clock: Clock,
        n_pages: int,
        n_rows: int,
        policy: SchedulePolicy = "lpm",
        tenants: Sequence[TenantConfig] = (),
    ) -> None:
        self.clock, self.slots = clock, slots
        limits = SchedulerLimits(
            max_num_seqs=n_rows,
            max_num_batched_tokens=128,
            max_queued_requests=1 << 20,
            num_reserved_decode_tokens=0,
        )
        self.scheduler = open_scheduler(
            PageCache(n_pages, PAGE_SIZE, page_quotas=page_quotas(tenants), min_copied_tokens=1, clock=clock),
            limits,
            schedule_policy=policy,
            tenants=tenants,
            adapter_slots=self.slots,
            clock=clock,
        )
        self.serials = count()
        self.n_live: Counter[tuple[str, str]] = Counter()
        """Requests that have not ended, by tenant and adapter."""
        self.n_computed: Counter[str] = Counter()
        """Tokens of each tenant's rows."""
        self.n_prompt = self.n_found = 0

    def submit(self, prompt: Sequence[int], adapter: str, max_tokens: int, tenant: str = "") -> None:
        """Adds a request."""
        request = Request(
            id=str(next(self.serials)),
            namespace=Namespace(adapter=adapter),
            known_key=bytearray(array("i", prompt).tobytes()),
            n_prompt=len(prompt),
            max_tokens=max_tokens,
            sender=tenant,
            adapter=ActiveAdapter(adapter),
            received_at=self.clock.now,
        )
        self.n_live[tenant, adapter] += 1
        self.scheduler.add(request)

    def turn(self) -> None:
        """Runs a turn of the loop. A copy of an adapter ends before the next one."""
        if self.slots._thread is not None:
            wait_readable([self.slots.fileno()], 10.0)
        self.slots.advance()
        plan = self.scheduler.schedule()
        self.clock.now += TURN_S
        if plan is None:
            return
        requests = self.scheduler.launched_plans[0].requests
        for row, request in zip(plan.rows, requests, strict=True):
            self.n_computed[request.sender] += row.n_tokens
        tokens = tuple(-1 if row.sampling is None else 1 for row in plan.rows)
        for update in self.scheduler.complete(plan, StepResult(tokens, (True,) * len(tokens))):
            if update.finish_reason is not None:
                request = update.request
                self.n_live[request.sender, request.adapter.digest] -= 1
                use = request.cache_use.counted
                assert use is not None, "the prompt is computed"
                self.n_prompt += request.n_prompt
                self.n_found += use.n_cached

    def end(self) -> None:
        """Runs until no request is left."""
        while self.n_live.total():
            self.turn()


def found(policy: SchedulePolicy) -> dict[str, Any]:
    """Returns the line of the case ``prefix``."""
    clock = Clock()
    slots = AdapterSlots(NoDevice(), 1, clock)
    run = Run(slots, clock, 4 * COMMON_TOKENS // PAGE_SIZE, 4, policy)
    for burst in range(N_BURSTS):
        for number, one in product(range(N_ADAPTERS), range(N_EACH)):
            begin = 100 * (number + 1)
            prompt = [*range(begin, begin + COMMON_TOKENS), burst + 1, one + 1]
            run.submit(prompt, str(number), 2)
        run.end()
    slots.close()
    return {"case": "prefix", "order": policy, "found_pct": round(100 * run.n_found / run.n_prompt, 1)}


def shares(n_slots: int, *, by_slot_time: bool, seconds: float) -> dict[str, Any]:
    """Returns the line of the case ``tenants``."""
    clock = Clock()
    slots = (AdapterSlots if by_slot_time else SlotsOfOneSender)(NoDevice(), n_slots, clock)
    run = Run(slots, clock, 512, 8, tenants=[TenantConfig(name) for name in (MANY, FEW)])
    streams = [(FEW, "few"), *((MANY, str(number)) for number in range(N_ADAPTERS))]
    while clock.now < seconds:
        for tenant, adapter in streams:
            while run.n_live[tenant, adapter] < N_WAITING:
                run.submit([1, 2, 3], adapter, ANSWER_TOKENS, tenant)
        run.turn()
    slots.close()
    return {
        "case": "tenants",
        "slots": n_slots,
        "order": "slot time" if by_slot_time else "age",
        "few_pct": round(100 * run.n_computed[FEW] / run.n_computed.total(), 1),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time, of the case tenants")
    arguments = parser.parse_args()
    about = {"seconds": arguments.seconds, **provenance()}
    for policy in ("fcfs", "lpm"):
        report(arguments.output_file, found(policy), about)
    for n_slots, by_slot_time in product((1, 2), (False, True)):
        line = shares(n_slots, by_slot_time=by_slot_time, seconds=arguments.seconds)
        report(arguments.output_file, line, about)


if __name__ == "__main__":
    main()
