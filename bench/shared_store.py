"""Times of a store that servers share: lookups, stores and loads of pages of the embedded model and of Llama 3 8B.

Usage: python bench/shared_store.py s3://BUCKET/PREFIX [--mebibytes 64] [--rounds 3]
       python bench/shared_store.py 'shm://bench-{page_bytes}?size=1GiB'

Prints JSON lines for one page alone and for all at once: the medians of all rounds, in seconds. The pages remain
in the store. A segment of ``shm://`` has pages of one size, which ``{page_bytes}`` puts into its name. Nothing is
looked up there, so ``look_up_s`` is the time of reading its table.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from statistics import median

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.runtime.tiers.open import open_shared_cache
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES, chain
from radixkv.runtime.tiers.stores.page_store import PageStore

PAGE_TOKEN_BYTES = 64
PAGES = {"tiny": 80 << 10, "8B": 2 << 20}
"""Bytes of a page of 16 tokens."""
N_LOADS = 3
"""Loads of the same pages, of which the median counts."""


def look_up(store: PageStore, keys: Sequence[bytes], n_pages: int) -> float:
    """Looks pages up, of which the store must have so many; returns the time."""
    started = time.perf_counter()
    ticket = store.look_up(keys)
    if ticket is not None:
        return seconds_of(store, ticket, n_pages)
    assert store.run(keys) == n_pages
    return time.perf_counter() - started


def seconds_of(store: PageStore, ticket: int | None, n_pages: int) -> float:
    """Waits for a transfer, which must succeed; returns its time, with that of waking this thread."""
    started = time.perf_counter()
    select.select([store.fileno()], [], [])
    (finished,) = store.take_finished()
    assert (finished.ticket, finished.n_pages) == (ticket, n_pages), finished
    return time.perf_counter() - started


def measure(url: str, page_bytes: int, n_pages: int) -> dict[str, float]:
    """Returns the seconds of each step for new pages, which one store writes and another one reads."""
    url = url.replace("{page_bytes}", str(page_bytes))
    writer, reader = (
        open_shared_cache(url).open_store(page_bytes=page_bytes, page_token_bytes=PAGE_TOKEN_BYTES)
        for _ in range(2)
    )
    tokens = os.urandom(n_pages * PAGE_TOKEN_BYTES)
    keys = chain(os.urandom(KEY_BYTES), tokens, PAGE_TOKEN_BYTES)
    contents = memoryview(bytearray(os.urandom(page_bytes)))
    seconds = {
        "look_up_absent": look_up(reader, keys, 0),
        "store": seconds_of(writer, writer.store(keys, tokens, [contents] * n_pages), n_pages),
        "look_up": look_up(reader, keys, n_pages),
    }
    slots = [memoryview(bytearray(os.urandom(1) * page_bytes)) for _ in keys]
    seconds["load"] = median(seconds_of(reader, reader.load(keys, tokens, slots), n_pages) for _ in range(N_LOADS))
    writer.close(1.0)
    reader.close(1.0)
    return seconds


def main() -> None:
    """Runs the benchmark."""
    parser = script_parser(__doc__)
    parser.add_argument("url", help="a --cache-url")
    parser.add_argument("--mebibytes", type=int, default=64, help="of pages that are moved at once")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    about = provenance()
    for model, page_bytes in PAGES.items():
        for n_pages in (1, max(2, (args.mebibytes << 20) // page_bytes)):
            rounds = [measure(args.url, page_bytes, n_pages) for _ in range(args.rounds)]
            medians = {f"{name}_s": round(median(each[name] for each in rounds), 5) for name in rounds[0]}
            case = {
                "benchmark": "shared_store",
                "store": args.url.partition(":")[0],
                "model": model,
                "page_bytes": page_bytes,
                "n_pages": n_pages,
            }
            report(args.output_file, case | medians, about)


if __name__ == "__main__":
    main()
