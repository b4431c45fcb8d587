"""``TextDrafts``: drafts from the text of each request, as many as experience says are worth checking."""

from __future__ import annotations

import math

from radixkv.runtime.drafts.own_text import continue_text
from radixkv.runtime.protocols import Drafts
from radixkv.runtime.request import Request
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.stats import DraftStats

MIN_CHANCE = 0.4
"""A draft is checked if it is accepted with this probability at least. Chosen, not measured: a token more costs
less than a row of its own, because weights and KV are read once for all tokens of a row."""
_WEIGHT = 1 / 16
"""Weight of a row in the moving average of its drafts' acceptance."""
_PROBE_EVERY = 32
"""Where drafts are not worth it, one row of so many has one all the same, to notice when that changes."""


class TextDrafts(Drafts):
    """Drafts what followed when the last tokens of a request came before in its prompt or answer.

    The length of the match is a class of its own, with a moving average of how likely the next draft is right. A
    row has the drafts whose chance, by that average, is at least ``MIN_CHANCE``.

    Args:
        config: lengths of drafts and of matches.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        low, high = config.prompt_lookup_min, config.prompt_lookup_max
        self._sizes = tuple(sorted({low, (low + high) // 2, high}))
        self._max_drafts = config.num_speculative_tokens
        self._acceptance = dict.fromkeys(self._sizes, 0.8)
        """Chance that a draft is accepted after all before it, by the length of the match."""
        self._match_length: dict[int, int] = {}
        """Length of the match of each row in flight, by batch slot."""
        self._n_skipped = 0
        """Rows without drafts because they are not worth it."""
        self._n_rows, self._n_drafted, self._n_accepted = 0, 0, 0

    @property
    def wants_results(self) -> bool:
        """Always: a device that computes when its result is taken loses nothing by it."""
        return True

    def draft(self, request: Request, max_drafts: int) -> bytes:
        """Returns what may follow a request's tokens. O(tokens of the request)."""
        n_drafts = min(max_drafts, self._max_drafts)
        found = continue_text(request.tokens, self._sizes, n_drafts)
        if found is None:
            return b""
        n_checked = int(math.log(MIN_CHANCE) / math.log(min(self._acceptance[found.n_matched], 0.999)))
        if not n_checked:
            self._n_skipped += 1
            n_checked = self._n_skipped % _PROBE_EVERY == 0
        self._match_length[request.batch_slot] = found.n_matched
        return found.tokens[: n_checked * TOKEN_BYTES]

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Learns from a row. O(1)."""
        self._n_rows += 1
        self._n_drafted += n_drafts
        self._n_accepted += n_accepted
        size = self._match_length[request.batch_slot]
        n_tried = min(n_drafts, n_accepted + 1)
        self._acceptance[size] += _WEIGHT * (n_accepted / n_tried - self._acceptance[size])

    def stats(self) -> DraftStats:
        """Returns the counters."""
        return DraftStats(self._n_rows, self._n_drafted, self._n_accepted)
