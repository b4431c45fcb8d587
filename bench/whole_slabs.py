"""What it costs that a window page needs a whole slab, beside memory in which any free pages make room for one.

Replays workloads of token_workloads.py on the production scheduler and cache, without a model, in a pool of slabs
that is too small for all of them. In ``any_pages`` a window page takes any free pages of a slab's size: no eviction
that looks for whole slabs could do better. No prompt repeats an answer. Appends one JSON line for each workload and
kind of memory.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any, Self

from result_lines import report, script_parser
from state_hits import MESSAGE_END, workload
from token_workloads import Phases

from radixkv.lab.bench.environment import provenance
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.free_pages import Slabs
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.states.window_tails import WindowTails
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.runtime.step.window_pool import max_window_pages
from radixkv.tree.node import Namespace
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 16
LIMITS = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=2048, max_queued_requests=4096)


class AnyPages(Slabs):
    """Slabs of which a window page takes any free pages: ``pages_per_slab`` of them."""

    def __init__(self, pages_per_slab: int, n_slabs: int, n_window_slabs: int) -> None:
        super().__init__(pages_per_slab, n_slabs, n_window_slabs)
        self._pages = list(range(pages_per_slab * n_slabs))
        self._names = list(range(n_slabs))
        """Those of window pages that nobody has."""
        self._taken: dict[int, list[int]] = {}

    def __iadd__(self, pages: Iterable[int]) -> Self:
        self._pages += pages
        self._n_free = len(self._pages)
        return self

    def take(self, n_pages: int) -> list[int]:
        taken = self._pages[-n_pages:]
        del self._pages[-n_pages:]
        self._n_free = len(self._pages)
        return taken

    @property
    def n_free_windows(self) -> int:
        return self.n_for_windows + self._n_free // self.pages_per_slab

    def take_window(self) -> int:
        if self._for_windows:
            return self._for_windows.pop()
        name = self._names.pop()
        self._taken[name] = self.take(self.pages_per_slab)
        self.n_shared += 1
        return name

    def give_window_back(self, page: int) -> None:
        if page >= self.n_slabs:
            self._for_windows.append(page)
            return
        self._names.append(page)
        self += self._taken.pop(page)
        self.n_shared -= 1


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--pages", type=int, default=24_000, help="of layers without windows (default: %(default)s)"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens (default: %(default)s, of Gemma 3 4B)")
    parser.add_argument("--pages-per-slab", type=int, default=6, help="(default: %(default)s, of Gemma 3 4B)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the workloads' sizes (default: %(default)s)")
    parser.add_argument("--workloads", default="fewshot,multiturn,agents", help="(default: %(default)s)")
    arguments = parser.parse_args()
    for name in arguments.workloads.split(","):
        requests = workload(name, arguments.scale)
        for kind in (Slabs, AnyPages):
            line = replay(requests, kind, arguments.pages, arguments.window, arguments.pages_per_slab)
            case = {"case": "whole_slabs", "workload": name, "memory": "slabs" if kind is Slabs else "any_pages"}
            report(arguments.output_file, case | line, provenance())


def replay(phases: Phases, kind: type[Slabs], n_pages: int, window: int, pages_per_slab: int) -> dict[str, Any]:
    """Returns what a pool finds and holds of a workload. The requests of a phase are sent together."""
    n_more = max_window_pages(window, LIMITS.max_num_batched_tokens, PAGE_SIZE)
    slabs = kind(pages_per_slab, n_pages // pages_per_slab, n_more)
    windows = WindowPages(slabs, window, PAGE_SIZE)
    cache = PageCache(
        len(slabs),
        PAGE_SIZE,
        n_states=slabs.n_slabs + n_more,
        state_block_tokens=PAGE_SIZE,
        window_pages=windows,
    )
    states = WindowTails(cache, windows, frozenset({MESSAGE_END}))
    scheduler = open_scheduler(cache, LIMITS, states=states)
    launched: deque[StepPlan] = deque()
    n_prompt = n_steps = n_rows = n_free = n_cached = 0
    symbol = 1_000_000
    for phase in phases:
        for index, (prompt, n_new) in enumerate(phase):
            tokens = bytearray(pack_tokens(prompt))
            scheduler.add(
                Request(
                    id=f"{n_prompt}.{index}",
                    namespace=Namespace(),
                    known_key=tokens,
                    n_prompt=len(prompt),
                    max_tokens=n_new,
                )
            )
            n_prompt += len(prompt)
        while not scheduler.is_idle:
            plan = scheduler.schedule()
            if plan is not None:
                launched.append(plan)
                n_steps += 1
                n_rows += len(plan.rows)
                n_free += cache.n_free
            if len(launched) < 2 and plan is not None:
                continue
            if launched:
                oldest = launched.popleft()
                symbol += 1
                sampled = array("i", [-1 if row.sampling is None else symbol for row in oldest.rows]).tolist()
                updates = scheduler.complete(oldest, StepResult(tuple(sampled), (True,) * len(sampled)))
                for update in updates:
                    if update.finish_reason is not None:
                        n_cached += _n_cached(update.request)
    return {
        "pages": n_pages,
        "pages_per_slab": pages_per_slab,
        "window": window,
        "hit_rate_pct": round(100 * n_cached / n_prompt, 2),
        "steps": n_steps,
        "rows_a_step": round(n_rows / n_steps, 1),
        "preemptions": scheduler.n_preemptions,
        "free_pct": round(100 * n_free / n_steps / n_pages, 2),
        "pages_evicted": cache.n_evicted,
    }


def _n_cached(request: Request) -> int:
    counted = request.cache_use.counted
    assert counted is not None, "a request that ends has been counted"
    return counted.n_cached


if __name__ == "__main__":
    main()
