"""The pages that waiting prompts will fetch, which the stores are told to keep longest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.runtime.tiers.stores.page_keys import KeyChain
from radixkv.runtime.tiers.stores.page_store import PageStore
from radixkv.runtime.tiers.tier_link import MAX_OFFERS_PER_TURN
from radixkv.tree.spared import WaitingPrompt


class SparedPages:
    """Remembers how much of each waiting prompt each store has, so that only what has changed is asked again.

    Args:
        stores: the stores.
        chain: makes the keys of prompts.
    """

    def __init__(self, stores: Sequence[PageStore], chain: KeyChain) -> None:
        self._stores, self._chain = stores, chain
        self._prompts: dict[WaitingPrompt, tuple[list[bytes], list[int]]] = {}
        """The keys of each prompt, and how many of the first ones each store had when it was last asked."""

    def spare(self, prompts: Iterable[WaitingPrompt]) -> None:
        """Tells the stores what prompts will fetch, before they make room for writes.

        O(prompts + pages that the stores got or lost), and O(tokens) for a bounded number of new prompts.

        Args:
            prompts: those that wait now, the one first that is needed first.
        """
        before, self._prompts = self._prompts, {}
        n_new = 0
        for prompt in prompts:
            if prompt in before:
                keys, n_stored = before[prompt]
            elif n_new < MAX_OFFERS_PER_TURN:
                n_new += 1
                keys, n_stored = self._chain.keys(*prompt), [0] * len(self._stores)
            else:
                continue
            n_stored = [_run_on(store, keys, n) for store, n in zip(self._stores, n_stored, strict=True)]
            self._prompts[prompt] = keys, n_stored
        for number, store in enumerate(self._stores):
            store.spare([keys[n[number] - 1] for keys, n in self._prompts.values() if n[number]])


def _run_on(store: PageStore, keys: Sequence[bytes], n_stored: int) -> int:
    """Returns how many leading pages a store has that had ``n_stored`` of them before. O(change)."""
    if n_stored and not store.has(keys[n_stored - 1]):
        n_stored = 0
    return n_stored + store.run(keys[n_stored:]) if n_stored < len(keys) and store.has(keys[n_stored]) else n_stored
