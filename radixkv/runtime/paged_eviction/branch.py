"""The branch of requests with a ``kv_budget``: who gets an eviction, and who is refused."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.paged_eviction.eviction import PagedEviction
from radixkv.runtime.protocols.request import RequestBranch
from radixkv.runtime.request import Request
from radixkv.runtime.step.executor import Executor
from radixkv.settings.config import MIN_BUDGET_PAGES
from radixkv.wire.messages import Submit
from radixkv.wire.stats import KVEvictionStats


class PagedEvictions:
    """Gives requests with a ``kv_budget`` their evictions.

    Args:
        cache: the page cache of the device.
        kv_budget: of requests that have none of their own; None: they keep all KV.
        refusal: why this engine can drop no pages; None: it can.
    """

    def __init__(self, cache: PageCache, kv_budget: int | None, refusal: str | None) -> None:
        self._cache = cache
        self._kv_budget = kv_budget
        self._refusal = refusal
        self._n_skipped = self._n_freed = 0

    @property
    def branch(self) -> RequestBranch:
        """What ``assemble_loop`` adds to the loop's branches."""
        return RequestBranch(self._is_chosen, self.follow)

    def stats(self) -> KVEvictionStats:
        """Returns what was dropped since the start."""
        return KVEvictionStats(pages_skipped_total=self._n_skipped - self._n_freed, pages_freed_total=self._n_freed)

    def follow(self, message: Submit, choices: Sequence[Request]) -> None:
        """Lets a new request drop pages.

        Raises:
            UnsupportedFeature: this engine can drop none.
            InvalidRequest: the request asks for something else that needs all pages, or the budget is too small.
        """
        if self._refusal is not None:
            raise UnsupportedFeature(self._refusal, param="kv_budget")
        own = message.sampling.kv_budget
        budget = (self._kv_budget or 0) if own is None else own
        if excluding := _excluding(message):
            raise InvalidRequest(
                f"{excluding[0]} does not work with kv_budget {budget}, which drops pages of the request; leave "
                "one of them out",
                param="kv_budget",
            )
        if (n_least := MIN_BUDGET_PAGES * self._cache.page_size) > budget:
            raise InvalidRequest(
                f"kv_budget is {budget}; it must be 0, or at least {n_least}, which is {MIN_BUDGET_PAGES} pages",
                param="kv_budget",
            )
        choices[0].kv_eviction = PagedEviction(self._cache, budget, count=self._count)

    def _is_chosen(self, message: Submit) -> bool:
        """Whether a request has a budget: its own, or the engine's, unless it needs all KV."""
        own = message.sampling.kv_budget
        if own is None:
            return self._kv_budget is not None and not _excluding(message)
        return own > 0

    def _count(self, n_skipped: int, n_freed: int) -> None:
        self._n_skipped += n_skipped
        self._n_freed += n_freed


def _excluding(message: Submit) -> list[str]:
    """Returns what a request asks for that needs all its KV: by a name of the fields, or what it is."""
    sampling = message.sampling
    asked = {
        "use_beam_search": sampling.use_beam_search,
        "n": sampling.n > 1,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "a pinned prompt (prompt_cache_options, cache_control)": bool(message.pins),
        "prediction": bool(message.prediction),
        "pooling": message.pooling is not None,
        "a check of the cache": message.is_canary,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def refusal_of(executor: Executor) -> str | None:
    """Returns why an engine can drop no pages of a request; None if it can."""
    if executor.n_states is not None and executor.window_pool is None:
        return "kv_budget needs a model without recurrent layers: their states cannot forget single pages"
    if executor.has_windows:
        return "kv_budget needs a model without sliding windows: these drop what is behind them already"
    if executor.n_ranks > 1:
        return (
            f"kv_budget does not work with tensor_parallel_size {executor.n_ranks}: each rank has other heads; "
            "use one rank"
        )
    return None
