"""``page_writer.py FOLDER SEED``: stores, loads and removes runs of pages until it is killed.

Run by a test, which kills it. It must import little, so that it starts soon.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from support.page_files import buffers, file_store, keys_of, page_of, tokens_of

PAGE_BYTES = 2**16
MAX_BYTES = 60 * (PAGE_BYTES + 4096)
"""Few enough pages that there is always something to evict."""
N_BRANCHES, N_PAGES = 8, 12
RUNS = [[branch, *range(N_PAGES - 1)] for branch in range(N_BRANCHES)]
"""Together more than the bound."""


def main() -> None:
    """Does not return."""
    folder, seed = sys.argv[1:]
    random = Random(int(seed))
    with file_store(Path(folder), page_bytes=PAGE_BYTES, max_bytes=MAX_BYTES) as store:
        has_begun = False
        while True:
            run = random.choice(RUNS)[: random.randint(1, N_PAGES)]
            slots = buffers(len(run), PAGE_BYTES)
            for key, slot in zip(keys_of(run), slots, strict=True):
                slot[:] = page_of(key, PAGE_BYTES)
            store.store(keys_of(run), tokens_of(run), slots)
            if random.random() < 0.05:
                store.remove(keys_of(run)[-1])
            store.take_finished()
            if store.n_pages and not has_begun:
                print("storing", flush=True)
                has_begun = True


if __name__ == "__main__":
    main()
