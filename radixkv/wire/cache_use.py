"""Where the KV of a prompt came from, as numbers; ``runtime/cache_use_record.py`` counts them."""

from __future__ import annotations

from operator import add

import msgspec


class CacheUse(msgspec.Struct, frozen=True, array_like=True):
    """What the cache gave and got of one prompt, or of many, in tokens."""

    n_cached: int = 0
    """Prompt tokens that were not computed."""
    n_copied: int = 0
    """The part of ``n_cached`` that was copied from pages with other tokens after them."""
    n_loaded: int = 0
    """The part of ``n_cached`` that was loaded from the host tier for the request."""
    n_fetched: int = 0
    """The part of ``n_loaded`` that came from disk before."""
    n_added: int = 0
    """Prompt tokens in pages that the cache did not have before, including what was copied into them."""
    n_shared: int = 0
    """The part of ``n_fetched`` that came from a store that servers share."""

    def __add__(self, other: CacheUse) -> CacheUse:
        return CacheUse(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    @property
    def in_whole_pages(self) -> CacheUse:
        """The same without the copies, which count as computed: they tell of other tokens in the same page."""
        return msgspec.structs.replace(self, n_cached=self.n_cached - self.n_copied, n_copied=0)

    def by_source(self, *, has_disk: bool) -> dict[str, int]:
        """Returns SGLang's ``cached_tokens_details``: the tier from which the cached tokens came."""
        tiers = {"device": self.n_cached - self.n_loaded, "host": self.n_loaded}
        return tiers | {"host": self.n_loaded - self.n_fetched, "storage": self.n_fetched} if has_disk else tiers
