"""Keys of pages outside the process: a SHA-256 chain over everything that a page's KV depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from typing import NamedTuple

from radixkv.tree.marks import Marks
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.version import __version__

DIGEST_BYTES = 32
KEY_BYTES = 2 * DIGEST_BYTES
"""Bytes of a key: its own digest, and the digest of the key that it continues."""

_KEY_VERSION = 2
_RUN_PAGES = 32
"""Pages whose keys are remembered together."""
_MAX_REMEMBERED_BYTES = 16 << 20
"""Memory of the remembered keys and their tokens."""
_OBJECT_BYTES = 64
"""About what Python needs for a key beside its bytes."""


class KVIdentity(NamedTuple):
    """What all pages of one engine depend on; a page of another identity never matches.

    The values are compared as they are, so their makers choose the form.
    """

    model: str
    """Digest of config and weights (``radixkv.checkpoints.fingerprint``)."""
    device: str
    """Kind of device: ``cpu`` or ``cuda``."""
    processor: str
    """Processor capability: the CPU's instruction sets, or the GPU's compute capability."""
    torch_version: str
    dtype: str
    """Dtype of activations."""
    kv_dtype: str
    """Dtype of K and V."""
    kv_scales: str
    """Scales of quantized K and V; empty if there are none."""
    layout: str
    """Order of the dimensions in a page, with their sizes."""
    page_size: int
    """Tokens per page."""


def root_key(identity: KVIdentity) -> bytes:
    """Returns the key that the keys of all namespaces continue.

    Digests the release, too: another release may compute other bits.
    """
    return _key(bytes(DIGEST_BYTES), repr((_KEY_VERSION, __version__, *identity)).encode())


def namespace_key(root: bytes, namespace: Namespace) -> bytes:
    """Returns the key that the first pages of a namespace continue.

    Digests the ``repr`` of the fields, so that no two namespaces give the same bytes.
    """
    return _key(root[:DIGEST_BYTES], repr(tuple(namespace)).encode())


def chain(parent: bytes, tokens: bytes, page_token_bytes: int, marks: Marks | None = None) -> list[bytes]:
    """Returns the keys of the whole pages of ``tokens``. O(tokens), some 2 µs a page.

    That of a page with a mark is made of the adapter's whole digest, too: a store has pages of other servers, where
    the mark may be another adapter's.

    Args:
        parent: key of the page before them, or of the namespace.
        tokens: little-endian int32.
        page_token_bytes: bytes of one page's tokens.
        marks: those in the tokens; None: there are none.
    """
    keys: list[bytes] = []
    adapters = {}
    if marks:
        adapters = {place * TOKEN_BYTES // page_token_bytes: mark.adapter for place, mark in marks.find(tokens)}
    for page, end in enumerate(range(page_token_bytes, len(tokens) + 1, page_token_bytes)):
        content = tokens[end - page_token_bytes : end]
        if page in adapters:
            content += adapters[page].encode()
        parent = _key(parent[:DIGEST_BYTES], content)
        keys.append(parent)
    return keys


class KeyChain:
    """Makes the keys of one engine's sequences, and remembers those of the tokens that it saw last.

    A sequence is looked up again and again while it grows. Its tokens are compared in runs of pages, which takes a
    twentieth of the time of digesting them; only what follows the last whole run is digested each time.

    Args:
        root: key of the engine, from ``root_key``.
        page_token_bytes: bytes of one page's tokens.
        marks: those in sequences; None: there are none.
    """

    def __init__(self, root: bytes, page_token_bytes: int, marks: Marks | None = None) -> None:
        self._root = root
        self._chain = partial(chain, marks=marks)
        self._page_token_bytes = page_token_bytes
        run_bytes = _RUN_PAGES * (page_token_bytes + KEY_BYTES + _OBJECT_BYTES)
        self._run = lru_cache(maxsize=max(1, _MAX_REMEMBERED_BYTES // run_bytes))(self._chain)

    def keys(self, namespace: Namespace, tokens: bytes) -> list[bytes]:
        """Returns the keys of the whole pages of a sequence. O(tokens), some 2 µs a page that is new.

        Args:
            namespace: the sequence's.
            tokens: the sequence from its start, little-endian int32.
        """
        keys: list[bytes] = []
        parent = namespace_key(self._root, namespace)
        run_bytes = _RUN_PAGES * self._page_token_bytes
        n_in_runs = len(tokens) - len(tokens) % run_bytes
        for start in range(0, n_in_runs, run_bytes):
            keys += self._run(parent, tokens[start : start + run_bytes], self._page_token_bytes)
            parent = keys[-1]
        return keys + self._chain(parent, tokens[n_in_runs:], self._page_token_bytes)


class StateKeys:
    """Makes the keys of states of recurrent layers, or window tails, which are kept as pages behind a prefix.

    A state has *parts*, each after a page: a recurrent state has one, after the last page before it; a window tail
    has a window page of each page of the window, so tails share parts. A part is kept as some pages, whose tokens
    are -1, which no prompt has. So their keys depend on everything that those of pages depend on, on the position,
    and are no keys of a sequence.

    Args:
        n_pages: pages that a part takes.
        interval: a sequence has states only after multiples of so many pages.
        page_token_bytes: bytes of one page's tokens.
        n_parts: parts of a state, if there are so many pages before it.
    """

    def __init__(self, n_pages: int, interval: int, page_token_bytes: int, n_parts: int = 1) -> None:
        self.n_pages = n_pages
        self._n_parts = n_parts
        self.tokens = b"\xff" * (n_pages * page_token_bytes)
        """The tokens of a part's pages."""
        self._interval = interval
        self._page_token_bytes = page_token_bytes

    def ends(self, last: int, first: int = 0) -> range:
        """Returns after how many pages of a sequence a state may be: more than ``first``, the deepest first."""
        return range(last - last % self._interval, first, -self._interval)

    def searched(self, last: int, first: int) -> list[range]:
        """Returns ``ends`` in groups in which the deepest state is found by halves, the deepest group first.

        All states of a group have the part before its first end, so there is none if that is missing. Where no part
        has been lost, the parts before the other ends are there up to the deepest state. A group has as many ends
        as a state has parts, except the deepest, which has one: prefixes mostly end with a state. O(groups).
        """
        ends = self.ends(last, first)
        size = (self._n_parts - 1) // self._interval + 1
        return [one for one in (ends[:1], *(ends[at : at + size][::-1] for at in range(1, len(ends), size))) if one]

    def parts(self, end: int) -> range:
        """Returns the entries of the pages that the parts of the state after ``end`` pages follow. O(1)."""
        return range(max(0, end - self._n_parts), end)

    def deepest(self, keys: Sequence[bytes], last: int, first: int, has: Callable[[bytes], bool]) -> int:
        """Returns after how many pages the deepest state is that is whole.

        O(pages), and a question for each part up to it.

        Args:
            keys: of a sequence's pages.
            last: the state is after so many pages at most.
            first: and after more than so many.
            has: whether there is the part after the page with a key.

        Returns:
            ``first`` without one.
        """
        end = last - last % self._interval
        while end > first:
            missing = next((entry for entry in reversed(self.parts(end)) if not has(keys[entry])), None)
            if missing is None:
                return end
            end = missing - missing % self._interval  # each state between them has the part that is missing
        return first

    def first(self, key: bytes) -> bytes:
        """Returns the key of the first page of the part after the page with a key. O(1)."""
        (first,) = chain(key, self.tokens[: self._page_token_bytes], self._page_token_bytes)
        return first

    def all(self, key: bytes) -> list[bytes]:
        """Returns the keys of all pages of the part after the page with a key. O(pages of a part)."""
        return chain(key, self.tokens, self._page_token_bytes)


def _key(parent_digest: bytes, content: bytes) -> bytes:
    return sha256(parent_digest + content).digest() + parent_digest
