"""The prompts of a replay, encoded as symbols that the production tree compares like tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, Protocol

from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.mooncake import BLOCK_LEN, TraceRequest
from radixkv.runtime.cache.cache import MIN_COPIED_TOKENS
from radixkv.tree.node import TOKEN_BYTES

Rule = Literal["blocks", "engine"]
"""What counts as a hit, and where a running request gets its pages.

``blocks``, the usual way to replay traces: a partially filled last block of a prompt is shared like any other; a
fully cached prompt computes nothing; the request in flight gets extra pages beside the capacity, and the cache may
keep none of them. ``engine``, as in radixkv: at least one token of each prompt is computed, and the request in
flight takes its pages from the capacity. If the tokens are known, parts of pages are copied; else only whole pages
are shared.
"""

_COMPACT_SYMBOLS = 2
"""Symbols of a compact page: the id of its block, and the index of the page in the block."""


class Traffic(Protocol):
    """Prompts in order of arrival.

    A page consists of ``symbols_per_page`` int32 symbols; two pages are equal if their symbols are. The last page
    of a prompt may have fewer symbols and is then not shared. With fewer symbols than tokens per page, the cost of
    a page does not depend on its size; the tree, the pool and the scheduler work as with tokens.
    """

    page_size: int
    """Tokens per page."""
    symbols_per_page: int
    """Symbols that stand for a page."""
    min_copied_symbols: int
    """Fewest symbols for which a part of a page is copied."""
    n_distinct_pages: int
    """Upper bound of the number of distinct pages."""

    @property
    def rule(self) -> Rule:
        """What counts as a hit."""
        ...

    @property
    def n_tokens(self) -> Sequence[int]:
        """Tokens of each prompt."""
        ...

    def symbols(self, index: int) -> bytes:
        """Returns a prompt's symbols, little-endian int32. O(pages)."""
        ...

    def n_cached_tokens(self, index: int, n_symbols: int) -> int:
        """Returns the cached tokens of a prompt of which ``n_symbols`` symbols were cached."""
        ...


class TokenTraffic:
    """Prompts with known tokens: each symbol is a token, and the rule is ``engine``.

    Args:
        prompts: token ids of each prompt, int32.
        page_size: tokens per page.
        min_copied_tokens: as in ``PageCache``.
    """

    rule: Rule = "engine"

    def __init__(
        self, prompts: Sequence[bytes], page_size: int, *, min_copied_tokens: int = MIN_COPIED_TOKENS
    ) -> None:
        self.page_size = self.symbols_per_page = page_size
        self.min_copied_symbols = min_copied_tokens
        self.n_tokens = [len(prompt) // TOKEN_BYTES for prompt in prompts]
        self.n_distinct_pages = sum(-(-n_tokens // page_size) for n_tokens in self.n_tokens)
        self._prompts = prompts

    def symbols(self, index: int) -> bytes:
        """Returns a prompt's token ids, little-endian int32. O(1)."""
        return self._prompts[index]

    def n_cached_tokens(self, index: int, n_symbols: int) -> int:
        """Returns ``n_symbols``, because each symbol is a token."""
        return n_symbols


class BlockTraffic:
    """Prompts of a trace that records only which blocks of 512 tokens are equal.

    Args:
        requests: the requests of the trace.
        page_size: tokens per page; a divisor of the block length.
        rule: what counts as a hit.
        compact_pages: represent a page by two symbols, and under the rule ``engine`` a partial page by one. This is
            fast, and exact for one request in flight. With several requests in flight steps are limited by tokens,
            so each symbol must be a token.

    Raises:
        ConfigError: the page size does not divide the block length, or is 1 without ``compact_pages``.
    """

    def __init__(
        self, requests: Sequence[TraceRequest], page_size: int, rule: Rule, *, compact_pages: bool = True
    ) -> None:
        if page_size < 1 or BLOCK_LEN % page_size:
            raise ConfigError(
                f"page_size {page_size} does not divide the trace's blocks of {BLOCK_LEN} tokens; give a divisor"
            )
        if not compact_pages and page_size < _COMPACT_SYMBOLS:
            raise ConfigError(f"page_size {page_size} is too small for several requests in flight; give 2 or more")
        self.rule = rule
        self.page_size = page_size
        self.symbols_per_page = _COMPACT_SYMBOLS if compact_pages else page_size
        self.min_copied_symbols = self.symbols_per_page
        self.n_tokens = [request.input_length for request in requests]
        self._pages_per_block = BLOCK_LEN // page_size
        prefix_ids: dict[tuple[int, int], int] = {}
        self._blocks = [_number_prefixes(request.hash_ids, prefix_ids) for request in requests]
        self.n_distinct_pages = len(prefix_ids) * self._pages_per_block

    def symbols(self, index: int) -> bytes:
        """Returns a prompt's symbols, little-endian int32. O(symbols)."""
        blocks, pages_per_block, width = self._blocks[index], self._pages_per_block, self.symbols_per_page
        symbols = array("i", bytes(TOKEN_BYTES * width * pages_per_block * len(blocks)))
        for page in range(pages_per_block):
            symbols[width * page :: width * pages_per_block] = blocks
        symbols[1::width] = array("i", range(pages_per_block)) * len(blocks)
        n_whole, remainder = divmod(self.n_tokens[index], self.page_size)
        n_in_last = min(remainder, width - 1) if self.rule == "engine" else width * bool(remainder)
        del symbols[width * n_whole + n_in_last :]
        return symbols.tobytes()

    def whole_blocks(self, index: int) -> Sequence[int]:
        """Returns an id for each whole block of a prompt: of it, and of all that is before it. O(blocks)."""
        return self._blocks[index][: self.n_tokens[index] // BLOCK_LEN]

    def n_cached_tokens(self, index: int, n_symbols: int) -> int:
        """Returns the cached tokens. The scheduler computes the last symbol of a prompt even if all are cached."""
        if self.symbols_per_page == self.page_size and self.rule == "engine":
            return n_symbols
        n_pages, remainder = divmod(n_symbols, self.symbols_per_page)
        if self.rule == "blocks":
            return min((n_pages + bool(remainder)) * self.page_size, self.n_tokens[index])
        return n_pages * self.page_size + (self.page_size - 1 if remainder else 0)


def _number_prefixes(hash_ids: Sequence[int], prefix_ids: dict[tuple[int, int], int]) -> array[int]:
    """Returns an id for each block; two blocks have the same id if they and all blocks before them are equal.

    Args:
        hash_ids: the blocks of a prompt.
        prefix_ids: id by (id of the previous block, hash id); extended by new blocks.
    """
    ids = array("i")
    prefix_id = -1
    for hash_id in hash_ids:
        prefix_id = prefix_ids.setdefault((prefix_id, hash_id), len(prefix_ids))
        ids.append(prefix_id)
    return ids
