"""Speed of the file store: GB/s of stores and loads by the size of pages, and the time that a start takes.

Usage: python bench/file_store.py [--folder DIR] [--mebibytes 512] [--rounds 3]

Prints one JSON line per case: the median of all rounds, each in a new folder. Pages at multiples of 4096 bytes in
memory go past the kernel's page cache, if the file system allows it. Others go through it: their stores end when it
has them, and they are dropped from it before they are loaded. ``start`` opens a folder that has these pages, whose
names the kernel still knows.
"""

from __future__ import annotations

import os
import select
import tempfile
import time
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import NamedTuple

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.runtime.tiers.stores.file_store import FileStore
from radixkv.runtime.tiers.stores.page_keys import KVIdentity, chain, namespace_key, root_key
from radixkv.tree.node import Namespace

PAGE_BYTES = (20 * 2**10, 128 * 2**10, 2 * 2**20)
PAGE_TOKEN_BYTES = 64
CLOSE_TIMEOUT_S = 60.0


class Round(NamedTuple):
    """Seconds that all pages took, and that the next start took."""

    store: float
    load: float
    start: float


def open_store(folder: Path, page_bytes: int) -> FileStore:
    """Opens a store without a bound that matters."""
    return FileStore(folder, page_bytes=page_bytes, page_token_bytes=PAGE_TOKEN_BYTES, max_bytes=2**50)


def wait(store: FileStore, n_pages: int) -> None:
    """Waits for the one transfer under way, which must be complete."""
    select.select([store.fileno()], [], [])
    (finished,) = store.take_finished()
    assert finished.n_pages == n_pages, finished


def drop_from_page_cache(folder: Path) -> None:
    """Makes the kernel forget the contents of the files."""
    os.sync()
    for file in folder.glob("??/*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(folder: Path, slots: Sequence[memoryview]) -> Round:
    """Stores and loads a page for each slot, as one run of one prompt."""
    tokens = os.urandom(PAGE_TOKEN_BYTES * len(slots))
    root = root_key(KVIdentity("model", "cpu", "", "", "bfloat16", "bfloat16", "", "", PAGE_TOKEN_BYTES // 4))
    keys = chain(namespace_key(root, Namespace()), tokens, PAGE_TOKEN_BYTES)
    store = open_store(folder, slots[0].nbytes)
    times = [time.perf_counter()]
    store.store(keys, tokens, slots)
    wait(store, len(slots))
    times.append(time.perf_counter())
    drop_from_page_cache(folder)
    times.append(time.perf_counter())
    store.load(keys, tokens, slots)
    wait(store, len(slots))
    times.append(time.perf_counter())
    store.close(CLOSE_TIMEOUT_S)
    times.append(time.perf_counter())
    store = open_store(folder, slots[0].nbytes)
    times.append(time.perf_counter())
    store.close(CLOSE_TIMEOUT_S)
    return Round(times[1] - times[0], times[3] - times[2], times[5] - times[4])


def main() -> None:
    """Runs all cases."""
    parser = script_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where to make temporary folders; default: the system's")
    parser.add_argument("--mebibytes", type=int, default=512, help="size of all pages together")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    about = provenance()
    for page_bytes in PAGE_BYTES:
        n_pages = args.mebibytes * 2**20 // page_bytes
        memory = memoryview(mmap(-1, n_pages * page_bytes + 8))
        for offset in (0, 8):
            rounds = []
            for _ in range(args.rounds):
                slots = [memory[offset + n * page_bytes : offset + (n + 1) * page_bytes] for n in range(n_pages)]
                for slot in slots:
                    slot[:4096] = os.urandom(4096)
                with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                    rounds.append(run(Path(folder) / "pages", slots))
            seconds = Round(*(median(values) for values in zip(*rounds, strict=True)))
            line = {
                "benchmark": "file_store",
                "page_bytes": page_bytes,
                "n_pages": n_pages,
                "aligned": offset == 0,
                "store_gb_per_s": round(n_pages * page_bytes / seconds.store / 1e9, 3),
                "load_gb_per_s": round(n_pages * page_bytes / seconds.load / 1e9, 3),
                "store_us_per_page": round(seconds.store / n_pages * 1e6, 1),
                "load_us_per_page": round(seconds.load / n_pages * 1e6, 1),
                "start_us_per_page": round(seconds.start / n_pages * 1e6, 1),
            }
            report(args.output_file, line, about)


if __name__ == "__main__":
    main()
