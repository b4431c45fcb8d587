"""Times of stores that servers share: lookups, stores and loads of pages of the embedded model and of Llama 3 8B.

Usage: python bench/shared_store.py s3://BUCKET/PREFIX [--mebibytes 64] [--rounds 3]
       python bench/shared_store.py 'shm://bench-{page_bytes}?size=1GiB' file:///FOLDER mooncake://HOST:PORT

Prints JSON lines for one page alone and for all at once: the medians of all rounds, in seconds, and the least and
most in ``ranges_s``. Each round goes through all stores, and leaves its pages in them. A segment of ``shm://``
has pages of one size, which ``{page_bytes}`` puts into its name. It needs no lookup, so ``look_up_s`` is the time
of reading its table. Files are written to the kernel's page cache, and dropped from it before each load, so a
folder on a disk is read from the disk; in ``/dev/shm`` that changes nothing.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from result_lines import about_stores, add_beside_flag, report, script_parser

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


def drop_from_page_cache(url: str) -> None:
    """Makes the kernel forget the contents of a store's files, if it is a folder."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return
    os.sync()
    for file in Path(parts.path).rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


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
    loads = []
    for _ in range(N_LOADS):
        drop_from_page_cache(url)
        loads.append(seconds_of(reader, reader.load(keys, tokens, slots), n_pages))
    seconds["load"] = median(loads)
    writer.close(1.0)
    reader.close(1.0)
    return seconds


def main() -> None:
    """Runs the benchmark."""
    parser = script_parser(__doc__)
    add_beside_flag(parser)
    parser.add_argument("urls", nargs="+", metavar="URL", help="a --cache-url")
    parser.add_argument("--mebibytes", type=int, default=64, help="of pages that are moved at once")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    about = about_stores(args.beside)
    for model, page_bytes in PAGES.items():
        for n_pages in (1, max(2, (args.mebibytes << 20) // page_bytes)):
            rounds = [[measure(url, page_bytes, n_pages) for url in args.urls] for _ in range(args.rounds)]
            for url, of_url in zip(args.urls, zip(*rounds, strict=True), strict=True):
                times = {name: sorted(round(each[name], 5) for each in of_url) for name in of_url[0]}
                case = {
                    "benchmark": "shared_store",
                    "store": url.partition(":")[0],
                    "url": url,
                    "model": model,
                    "page_bytes": page_bytes,
                    "n_pages": n_pages,
                    "rounds": args.rounds,
                    **{f"{name}_s": round(median(values), 5) for name, values in times.items()},
                    "ranges_s": {name: (values[0], values[-1]) for name, values in times.items()},
                }
                report(args.output_file, case, about)


if __name__ == "__main__":
    main()
