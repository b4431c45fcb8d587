"""Requests whose pages are on a disk and in a store over a network: fetched from one of them, both, or computed.

Prompts are documents with a question. Disk and network have the pages of each document in one of ``SPREADS``, so
that some are found in one place only. Scheduler, caches, tiers, page files and the shared store are the server's,
in real time. A step takes a modelled time a token, and copies between host and device none. The network is a link
with a round trip and a bandwidth, before objects in memory, or before a real store with ``--url``.

Each case serves the same prompts, one at a time, with empty caches and full stores:

computing   nothing is fetched
disk        the disk alone, where that is faster than computing
network     the network alone, where that is faster than computing
both        each part from where it is soonest, or computed: what a server does
everything  all that disk or network have is fetched, whatever it takes (``--load-policy always``)

Prints a JSON line for each link and case. ``cheapest_pct`` says for how many prompts no other case gave the first
token sooner, by more than a tenth and 10 ms; ``later_mean_ms`` says by how much the best one was sooner.

    python bench/two_places.py --output-file bench/results/two_places.jsonl
    python bench/two_places.py --link 5:10000 --token-us 200
    AWS_ENDPOINT_URL=http://127.0.0.1:5000 python bench/two_places.py --url s3://BUCKET/PREFIX
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.lab.bench.report.run_metrics import percentile
from radixkv.lab.simulator.instant_copies import InstantCopier
from radixkv.lab.simulator.step_time import StepTime
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import Scheduler, SchedulerLimits
from radixkv.runtime.step.result import StepResult
from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.runtime.tiers.load_choice import LoadChoice
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.open import open_objects
from radixkv.runtime.tiers.storage_tier import StorageTier
from radixkv.runtime.tiers.stores.file_store import FileStore
from radixkv.runtime.tiers.stores.object_store import ObjectStore
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES, KeyChain
from radixkv.runtime.tiers.stores.page_store import PageStore
from radixkv.runtime.tiers.stores.shared_store import SharedStore
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 16
PAGE_TOKEN_BYTES = PAGE_SIZE * TOKEN_BYTES
VOCAB = 100_000
QUESTION_TOKENS = 40
CASES = {
    "computing": ("never", ()),
    "disk": ("auto", ("disk",)),
    "network": ("auto", ("network",)),
    "both": ("auto", ("disk", "network")),
    "everything": ("always", ("disk", "network")),
}
"""The load policy and the places of each case."""
SPREADS = ("disk", "network", "both", "disk begins", "network begins", "apart")
"""Which place has a document: one, both, one its beginning and the other all, or each a part of its own."""
_HEADER_BYTES = 500
"""About what a call takes beside the object."""
_ROOT = bytes(KEY_BYTES)


class Link(NamedTuple):
    """A network to a store."""

    round_trip_s: float
    bytes_per_s: float


class Document(NamedTuple):
    """A prompt, and how many of its pages each place has: from the first of a range to the last."""

    tokens: bytes
    """The document's, in whole pages."""
    question: bytes
    places: dict[str, range]


class DistantObjects:
    """An ``ObjectStore`` behind a link, which sends the bytes of one call after another each way.

    Args:
        objects: the objects.
        link: the link.
    """

    n_parallel = 32

    def __init__(self, objects: ObjectStore, link: Link) -> None:
        self._objects, self._link = objects, link
        self._free_at = {"up": 0.0, "down": 0.0}

    async def have(self, names: Sequence[str]) -> list[bool]:
        """See ``ObjectStore``."""
        found = await self._objects.have(names)
        await self._pass("up", _HEADER_BYTES * len(names))
        return found

    async def get(self, name: str) -> memoryview | None:
        """See ``ObjectStore``."""
        value = await self._objects.get(name)
        await self._pass("down", _HEADER_BYTES + (0 if value is None else value.nbytes))
        return value

    async def put(self, name: str, value: memoryview) -> bool:
        """See ``ObjectStore``."""
        await self._pass("up", _HEADER_BYTES + value.nbytes)
        return await self._objects.put(name, value)

    async def delete(self, name: str) -> bool:
        """See ``ObjectStore``."""
        await self._pass("up", _HEADER_BYTES)
        return await self._objects.delete(name)

    def close(self) -> None:
        """See ``ObjectStore``. The objects stay open."""

    async def _pass(self, way: str, n_bytes: int) -> None:
        now = time.perf_counter()
        self._free_at[way] = max(now, self._free_at[way]) + n_bytes / self._link.bytes_per_s
        await asyncio.sleep(self._free_at[way] + self._link.round_trip_s - now)


class ObjectsInMemory:
    """An ``ObjectStore`` in a dict."""

    n_parallel = 32

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    async def have(self, names: Sequence[str]) -> list[bool]:
        """See ``ObjectStore``."""
        return [name in self._objects for name in names]

    async def get(self, name: str) -> memoryview | None:
        """See ``ObjectStore``."""
        return memoryview(self._objects[name]) if name in self._objects else None

    async def put(self, name: str, value: memoryview) -> bool:
        """See ``ObjectStore``."""
        self._objects[name] = bytes(value)
        return True

    async def delete(self, name: str) -> bool:
        """See ``ObjectStore``."""
        self._objects.pop(name, None)
        return True

    def close(self) -> None:
        """See ``ObjectStore``."""


class MemoryCopier(InstantCopier):
    """Copies between device and host memory that take no time; the host slots have memory.

    Args:
        n_slots: host slots.
        page_bytes: size of a page.
    """

    def __init__(self, n_slots: int, page_bytes: int) -> None:
        super().__init__(0.0)
        self.page_bytes = page_bytes
        self._memory = memoryview(bytearray(n_slots * page_bytes))
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)

    def load(self, slots: Sequence[int], pages: Sequence[int], states: Sequence[tuple[int, int]] = ()) -> int:
        """See ``PageCopier``."""
        os.eventfd_write(self._ready, 1)
        return super().load(slots, pages)

    def take_finished(self) -> list[Any]:
        """See ``PageCopier``."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        return super().take_finished()

    def buffer(self, slot: int) -> memoryview:
        """Returns the memory of a slot."""
        return self._memory[slot * self.page_bytes : (slot + 1) * self.page_bytes]

    def fileno(self) -> int:
        """See ``PageCopier``."""
        return self._ready

    def close(self) -> None:
        """See ``PageCopier``."""
        os.close(self._ready)


class Server:
    """Scheduler, caches and tiers of a server, whose steps sleep as long as they would compute.

    Args:
        stores: its places.
        policy: ``--load-policy``.
        times: of steps.
        max_pages: most pages of a prompt.
        page_bytes: size of a page.
    """

    def __init__(
        self, stores: Sequence[PageStore], policy: Any, times: StepTime, max_pages: int, page_bytes: int
    ) -> None:
        n_pages, n_measured, cost = 4 * max_pages, 1 << 20, LoadCost()
        cost.add_load(n_measured, 1e-9)
        cost.add_step(n_measured, n_measured, n_measured * times.prompt_token_s)
        self._times = times
        self.cache, self.host = PageCache(n_pages, PAGE_SIZE), PageCache(n_pages, PAGE_SIZE)
        copier = MemoryCopier(n_pages, page_bytes)
        self.disk = StorageTier(self.host, stores, _ROOT, copier.buffer, cost) if stores else None
        self.host_tier = HostTier(
            self.cache, self.host, copier, self.disk, LoadChoice(policy, cost), write_policy="selective"
        )
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=8192, max_queued_requests=8)
        self._scheduler: Scheduler = open_scheduler(self.cache, limits, host_tier=self.host_tier)

    def serve(self, name: str, tokens: bytes) -> tuple[float, Request]:
        """Serves a prompt alone, then writes what it has fetched, and empties the caches.

        Returns:
            The time to the first token, and the request.
        """
        request = Request(name, Namespace(), bytearray(tokens), len(tokens) // TOKEN_BYTES, 1)
        begun = time.perf_counter()
        self._scheduler.add(request)
        is_done = False
        while not is_done:
            plan = self._scheduler.schedule()
            if plan is None:
                self.host_tier.wait(0.1)
                continue
            time.sleep(self._times.seconds(plan.n_prompt_tokens, len(plan.rows)))
            tokens_of_rows = tuple(5 if row.sampling is not None else -1 for row in plan.rows)
            result = StepResult(tokens_of_rows, (True,) * len(plan.rows))
            is_done = any(one.finish_reason is not None for one in self._scheduler.complete(plan, result))
        ttft_s = time.perf_counter() - begun
        self._scheduler.tiers.ended((request,))
        while self.host_tier.is_busy or self.host_tier.n_offers or (self.disk is not None and self.disk.n_offers):
            self.host_tier.advance()
            self.host_tier.wait(0.01)
        self.cache.flush()
        self.host.flush()
        return ttft_s, request

    def close(self) -> None:
        """Closes the tiers."""
        self.host_tier.close(5.0)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--documents", type=int, default=90)
    parser.add_argument("--warm-up", type=int, default=18, help="documents before them, which do not count")
    parser.add_argument("--max-pages", type=int, default=96, help="of a document; a sixth of it at least")
    parser.add_argument("--page-kib", type=int, default=80, help="of 16 tokens")
    parser.add_argument("--token-us", type=float, default=500.0, help="time to compute a token of a prompt")
    parser.add_argument("--step-ms", type=float, default=6.0, help="time of a step beside its tokens")
    parser.add_argument(
        "--link",
        action="append",
        metavar="MS:MBIT",
        help="round trip and Mbit/s; may occur several times (default: 1:1000 and 20:100)",
    )
    parser.add_argument("--url", help="a --cache-url for the objects behind the link (default: in memory)")
    parser.add_argument("--folder", type=Path, help="where the disk's folders are made (default: /tmp)")
    arguments = parser.parse_args()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output_file", "link")}
    about = {**settings, "folder": str(arguments.folder or tempfile.gettempdir()), **provenance()}
    documents = make_documents(arguments.warm_up + arguments.documents, arguments.max_pages)
    for link in arguments.link or ("1:1000", "20:100"):
        runs = {case: run(case, link, documents, arguments) for case in CASES}
        for case, served in runs.items():
            line = summarize(served, [[one.ttft_s for one in other] for other in runs.values()])
            report(arguments.output_file, {"benchmark": "two_places", "link": link, "case": case, **line}, about)


class Served(NamedTuple):
    """How a prompt was served."""

    ttft_s: float
    n_prompt: int
    n_cached: int
    n_fetched: int
    n_from_network: int


def run(case: str, link: str, documents: Sequence[Document], arguments: argparse.Namespace) -> list[Served]:
    """Serves all documents; returns what became of those that count."""
    policy, places = CASES[case]
    milliseconds, megabits = map(float, link.split(":"))
    page_bytes = arguments.page_kib << 10
    times = StepTime(arguments.step_ms / 1e3, prompt_token_s=arguments.token_us / 1e6)
    objects = ObjectsInMemory() if arguments.url is None else open_objects(f"{arguments.url}/{time.time_ns()}")
    distant = DistantObjects(objects, Link(milliseconds / 1e3, megabits * 1e6 / 8))
    with tempfile.TemporaryDirectory(prefix="two-places-", dir=arguments.folder) as folder:
        for place in places:
            store = open_store(place, Path(folder), objects, page_bytes)
            fill(store, [(one.tokens, one.places[place]) for one in documents])
            store.close(60.0)
        stores = [open_store(place, Path(folder), distant, page_bytes) for place in places]
        server = Server(stores, policy, times, arguments.max_pages + 4, page_bytes)
        served = []
        for number, document in enumerate(documents):
            ttft_s, request = server.serve(f"{case}-{number}", document.tokens + document.question)
            use = request.cache_use.counted
            assert use is not None
            is_shared = places == ("network",)
            n_shared = use.n_fetched if is_shared else use.n_shared
            served.append(Served(ttft_s, request.n_prompt, use.n_cached, use.n_fetched, n_shared))
        server.close()
    objects.close()
    return served[arguments.warm_up :]


def open_store(place: str, folder: Path, objects: ObjectStore, page_bytes: int) -> PageStore:
    """Opens the store of a place."""
    if place == "disk":
        return FileStore(
            folder / "pages", page_bytes=page_bytes, page_token_bytes=PAGE_TOKEN_BYTES, max_bytes=64 << 30
        )
    return SharedStore(objects, "the network", page_bytes=page_bytes, page_token_bytes=PAGE_TOKEN_BYTES)


def fill(store: PageStore, documents: Sequence[tuple[bytes, range]]) -> None:
    """Writes the pages of documents that a place has."""
    chain = KeyChain(_ROOT, PAGE_TOKEN_BYTES)
    content = memoryview(bytearray(os.urandom(store.page_bytes)))
    for tokens, pages in documents:
        if not pages:
            continue
        keys = chain.keys(Namespace(), tokens)[pages.start : pages.stop]
        of_pages = tokens[pages.start * PAGE_TOKEN_BYTES : pages.stop * PAGE_TOKEN_BYTES]
        ticket = store.store(keys, of_pages, [content] * len(keys))
        select.select([store.fileno()], [], [])
        (finished,) = store.take_finished()
        assert (finished.ticket, finished.n_pages) == (ticket, len(keys)), "the store has not taken all pages"


def make_documents(n_documents: int, max_pages: int) -> list[Document]:
    """Returns documents of random lengths, whose pages are spread in each way equally often."""
    rng = Random(7)
    documents = []
    for number in range(n_documents):
        n_pages = rng.randint(max(2, max_pages // 6), max_pages)
        tokens, question = (
            pack_tokens([rng.randrange(10, VOCAB) for _ in range(n)])
            for n in (n_pages * PAGE_SIZE, QUESTION_TOKENS)
        )
        cut, whole, none = rng.randrange(1, n_pages), range(n_pages), range(0)
        places = {
            "disk": (whole, none),
            "network": (none, whole),
            "both": (whole, whole),
            "disk begins": (range(cut), whole),
            "network begins": (whole, range(cut)),
            "apart": (range(cut), range(cut, n_pages)),
        }[SPREADS[number % len(SPREADS)]]
        documents.append(Document(tokens, question, dict(zip(("disk", "network"), places, strict=True))))
    return documents


def summarize(served: Sequence[Served], ttfts_s: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns the numbers of a case.

    Args:
        served: its prompts.
        ttfts_s: times to the first token of each case, with the same prompts.
    """
    own, ordered = [one.ttft_s for one in served], sorted(one.ttft_s for one in served)
    best = [min(times) for times in zip(*ttfts_s, strict=True)]
    are_cheapest = [mine <= 1.1 * least + 0.01 for mine, least in zip(own, best, strict=True)]
    later_s = sorted(mine - least for mine, least in zip(own, best, strict=True))
    return {
        "prompts": len(served),
        "prompt_tokens": sum(one.n_prompt for one in served),
        "hit_tokens": sum(one.n_cached for one in served),
        "disk_tokens": sum(one.n_fetched - one.n_from_network for one in served),
        "network_tokens": sum(one.n_from_network for one in served),
        "ttft_p50_ms": round(1e3 * percentile(ordered, 50), 1),
        "ttft_p99_ms": round(1e3 * percentile(ordered, 99), 1),
        "ttft_mean_ms": round(1e3 * mean(own), 1),
        "cheapest_pct": round(100 * mean(are_cheapest), 1),
        "later_mean_ms": round(1e3 * mean(later_s), 1),
        "later_p99_ms": round(1e3 * percentile(later_s, 99), 1),
    }


if __name__ == "__main__":
    main()
