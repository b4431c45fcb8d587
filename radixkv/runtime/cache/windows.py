"""The pages of a request that lie behind the sliding windows of all layers. See docs/decisions/0040-windows.md."""

from __future__ import annotations

from radixkv.runtime.cache.block_table import BlockTable


class Windows:
    """Says which pages of a request without a lease no row reads any more. O(1) each.

    Args:
        page_size: tokens per page.
        n_tokens: the most positions that a token attends to in any layer, its own included; None if a layer has no
            window.
    """

    def __init__(self, page_size: int, n_tokens: int | None) -> None:
        self._page_size = page_size
        self.n_tokens = n_tokens

    def n_behind(self, blocks: BlockTable, n_tokens: int) -> int:
        """Returns how many leading pages lie behind the windows of a row at ``n_tokens``; 0 with a lease."""
        if self.n_tokens is None or blocks.lease is not None:
            return 0
        return max(0, n_tokens + 1 - self.n_tokens) // self._page_size

    def first_copied(self, blocks: BlockTable, n_tokens: int) -> int:
        """Returns the first entry that a fork of ``n_tokens`` tokens copies: those before are leased, or behind the
        windows of its first row."""
        return max(blocks.n_leased, self.n_behind(blocks, n_tokens))

    def max_pages(self, max_row_tokens: int) -> int | None:
        """Returns the most pages that a request without a lease needs at once: those of a window and of a row of
        ``max_row_tokens``. None if it needs those of all its tokens, because a layer has no window."""
        if self.n_tokens is None:
            return None
        return -(-(self.n_tokens + max_row_tokens) // self._page_size) + 1
