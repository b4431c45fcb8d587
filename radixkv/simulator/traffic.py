"""What is replayed: prompts in order, as symbols that the production tree shares pages by."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, Protocol

from radixkv.bench.workloads.datasets.mooncake import BLOCK_LEN, TraceRequest
from radixkv.errors import ConfigError
from radixkv.tree.node import TOKEN_BYTES

Rule = Literal["blocks", "engine"]
"""What counts as a hit, and what a request takes.

``blocks``, as traces are usually replayed: the last block of a prompt is shared like any other, however few tokens
it has; a prompt that is cached whole computes nothing; and the request in flight has room of its own beside the
capacity, so that nothing of it need be kept. ``engine``, as radixkv does it: only whole pages are shared, a token
of every prompt is computed, and the request in flight takes its pages from the capacity.
"""

_PAIR = 2
"""Symbols that tell a page: its block's number, and which page of the block it is."""


class Traffic(Protocol):
    """Prompts in the order in which they come.

    A page is ``symbols_a_page`` symbols, int32 each; two pages are equal if these are. A prompt's last page may
    have fewer, and is not shared then. With fewer symbols than tokens the replay of a page costs the same, whatever
    its size; the tree, the pool and the scheduler cannot tell.
    """

    page_size: int
    """Tokens a page."""
    symbols_a_page: int
    n_distinct_pages: int
    """No fewer than there are."""

    @property
    def rule(self) -> Rule:
        """What counts as a hit."""
        ...

    @property
    def n_tokens(self) -> Sequence[int]:
        """Of each prompt."""
        ...

    def symbols(self, index: int) -> bytes:
        """A prompt, little-endian int32. O(pages)."""
        ...

    def n_cached_tokens(self, index: int, n_symbols: int) -> int:
        """The prompt's tokens that were not computed, if ``n_symbols`` were not."""
        ...


class TokenTraffic:
    """Prompts whose tokens are known: a symbol is a token, and the rule is the engine's.

    Args:
        prompts: int32 ids.
        page_size: tokens.
    """

    rule: Rule = "engine"

    def __init__(self, prompts: Sequence[bytes], page_size: int) -> None:
        self.page_size = self.symbols_a_page = page_size
        self.n_tokens = [len(prompt) // TOKEN_BYTES for prompt in prompts]
        self.n_distinct_pages = sum(-(-n_tokens // page_size) for n_tokens in self.n_tokens)
        self._prompts = prompts

    def symbols(self, index: int) -> bytes:
        """A prompt, little-endian int32. O(1)."""
        return self._prompts[index]

    def n_cached_tokens(self, index: int, n_symbols: int) -> int:
        """The same number."""
        return n_symbols


class BlockTraffic:
    """A trace's prompts, of which only is known which blocks of 512 tokens are equal.

    Args:
        requests: the trace's.
        page_size: tokens; divides a block.
        rule: what counts as a hit.
        abbreviates: whether two symbols stand for a page, and one for a page that is not full: quick, and exact
            for one request in flight. With several their steps count tokens; then a symbol is a token.

    Raises:
        ConfigError: the page size does not divide a block, or is 1 and must not be abbreviated.
    """

    def __init__(
        self, requests: Sequence[TraceRequest], page_size: int, rule: Rule, *, abbreviates: bool = True
    ) -> None:
        if page_size < 1 or BLOCK_LEN % page_size:
            raise ConfigError(
                f"page_size {page_size} does not divide the trace's blocks of {BLOCK_LEN} tokens; give a divisor"
            )
        if not abbreviates and page_size < _PAIR:
            raise ConfigError(f"page_size {page_size} is too small for several requests in flight; give 2 or more")
        self.rule = rule
        self.page_size = page_size
        self.symbols_a_page = _PAIR if abbreviates else page_size
        self.n_tokens = [request.input_length for request in requests]
        self._pages_a_block = BLOCK_LEN // page_size
        numbers: dict[tuple[int, int], int] = {}
        self._blocks = [_numbered(request.hash_ids, numbers) for request in requests]
        self.n_distinct_pages = len(numbers) * self._pages_a_block

    def symbols(self, index: int) -> bytes:
        """A prompt, little-endian int32. O(symbols)."""
        blocks, pages_a_block, width = self._blocks[index], self._pages_a_block, self.symbols_a_page
        symbols = array("i", bytes(TOKEN_BYTES * width * pages_a_block * len(blocks)))
        for page in range(pages_a_block):
            symbols[width * page :: width * pages_a_block] = blocks
        symbols[1::width] = array("i", range(pages_a_block)) * len(blocks)
        n_whole, n_more = divmod(self.n_tokens[index], self.page_size)
        n_in_last = min(n_more, width - 1) if self.rule == "engine" else width * bool(n_more)
        del symbols[width * n_whole + n_in_last :]
        return symbols.tobytes()

    def n_cached_tokens(self, index: int, n_symbols: int) -> int:
        """Tokens of the cached pages; of a prompt that is cached whole the scheduler computes its last symbol."""
        if self.symbols_a_page == self.page_size and self.rule == "engine":
            return n_symbols
        n_pages, n_more = divmod(n_symbols, self.symbols_a_page)
        if self.rule == "blocks":
            return min((n_pages + bool(n_more)) * self.page_size, self.n_tokens[index])
        return n_pages * self.page_size + (self.page_size - 1 if n_more else 0)


def _numbered(hash_ids: Sequence[int], numbers: dict[tuple[int, int], int]) -> array[int]:
    """A number for each block, the same as another's if all blocks up to there are equal."""
    found = array("i")
    number = -1
    for hash_id in hash_ids:
        number = numbers.setdefault((number, hash_id), len(numbers))
        found.append(number)
    return found
