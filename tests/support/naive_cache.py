"""A naive model of a page cache, and requests of a trace for it."""

from __future__ import annotations

from radixkv.lab.bench.workloads.mooncake import TraceRequest

BLOCK = 512


def trace_request(hash_ids, n_in_last=BLOCK):
    return TraceRequest(0.0, BLOCK * (len(hash_ids) - 1) + n_in_last, 1, list(hash_ids))


def prefixes(pages):
    return [tuple(pages[: end + 1]) for end in range(len(pages))]


class Naive:
    """A cache of pages, each identified by its whole prefix; ``pages`` has the pages of each prompt."""

    def __init__(self, pages, capacity, *, knows_future, knows_ends=False):
        self.paths = [prefixes(each) for each in pages]
        self.capacity = capacity
        self.knows_future = knows_future
        self.knows_ends = knows_ends
        self.last_use = {}

    def use(self, index):
        """Returns how many pages were cached; then caches all pages of the prompt, ignoring the capacity."""
        path = self.paths[index]
        n_cached_pages = next((n for n, page in enumerate(path) if page not in self.last_use), len(path))
        self.last_use |= dict.fromkeys(path, index)
        return n_cached_pages

    def evict(self, index, max_pages, keep=()):
        """Evicts pages down to ``max_pages``, except those in ``keep``."""
        while len(self.last_use) > max_pages:
            evictable = [page for page in self.last_use if page not in keep]
            del self.last_use[min(evictable, key=lambda page: self.priority(page, index))]

    def priority(self, page, index):
        value, never = self.last_use[page], len(self.paths)
        next_use = next((j for j in range(index + 1, never) if page in self.paths[j]), never)
        if self.knows_future:
            value = -next_use
        elif self.knows_ends and next_use == never:
            value = -1
        return value, -len(page)
