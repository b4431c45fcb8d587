"""Marks: numbers that stand in keys for the tokens from which on activated LoRAs change what is computed.

The *key* of a sequence is what the tree has of it: its tokens. An activated LoRA changes K and V from one position
on, so there its key has a *mark* in place of the token: a negative number, which no token is. Every request finds
what is before the mark, and only those of this adapter what follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from radixkv.errors import CheckpointError, InvariantError
from radixkv.tree.node import TOKEN_BYTES

_N_MARKS = 2**31 - 1
"""The negative int32 but -1, which stands for no token elsewhere."""
_DIGEST_DIGITS = 8
"""Leading hex digits of an adapter's digest that give its mark."""


class MarkedKey(NamedTuple):
    """The key of a prompt, and where an adapter begins to act in it."""

    key: bytes
    """Little-endian int32."""
    position: int | None
    """That of the mark; None: the key has none."""


class Mark(NamedTuple):
    """What a mark stands for."""

    adapter: str
    """Digest of the adapter that acts from it on."""
    token: bytes
    """The token in its place, little-endian int32."""


class Marks:
    """The marks of all activated LoRAs that were ever loaded, none of which is ever another one's.

    None is forgotten, because pages outlive their adapter. Each costs some hundred bytes.
    """

    def __init__(self) -> None:
        self._invocations: dict[str, bytes] = {}
        """The invocation tokens of each adapter, by its digest."""
        self._marks: dict[int, Mark] = {}
        self._loaded: dict[str, None] = {}
        """The digests of those that new requests may have, in the order in which they were loaded."""

    def __len__(self) -> int:
        """The number of activated LoRAs that new requests may have."""
        return len(self._loaded)

    def __contains__(self, adapter: object) -> bool:
        """Whether a digest is that of an activated LoRA. O(1)."""
        return adapter in self._invocations

    def add(self, adapter: str, invocation_tokens: Sequence[int]) -> None:
        """Gives an adapter its mark, which depends on its digest alone. O(1).

        Args:
            adapter: its digest, in hexadecimal digits.
            invocation_tokens: at least one id.

        Raises:
            CheckpointError: another adapter has this mark.
        """
        invocation = np.array(invocation_tokens, "<i4").tobytes()
        mark = _number(adapter)
        other = self._marks.setdefault(mark, Mark(adapter, invocation[:TOKEN_BYTES])).adapter
        if other != adapter:
            raise CheckpointError(
                f"activated LoRA {adapter[:12]}… has the mark of {other[:12]}…, which this engine has loaded "
                "before, so their pages could be confused; start the engine again without one of them"
            )
        self._invocations[adapter] = invocation
        self._loaded[adapter] = None

    def unload(self, adapter: str) -> None:
        """Notes that no new request has an adapter, which may have no mark. Its mark stays its own. O(1)."""
        self._loaded.pop(adapter, None)

    def key(self, adapter: str, tokens: bytes) -> MarkedKey:
        """Returns the key of a prompt: with a mark where the last invocation of an activated LoRA begins.

        O(bytes), a search from the end.

        Args:
            adapter: digest of the request's; one without invocation tokens, or none, marks nothing.
            tokens: the prompt, little-endian int32.
        """
        position = None if (one := self._invocations.get(adapter)) is None else _last_place(tokens, one)
        return MarkedKey(tokens, None) if position is None else MarkedKey(_put(adapter, tokens, position), position)

    def recent_keys(self, adapter: str, tokens: bytes) -> Iterator[tuple[str, bytes]]:
        """Yields the keys with a mark that a prompt, and the turn before it, have with each adapter.

        These are the keys with the mark at one of the last two occurrences of the invocation, each with the digest
        of its adapter. O(bytes) for each activated LoRA that is loaded.

        Args:
            adapter: digest of one that may be unloaded, and counts, too; any other is ignored.
            tokens: the prompt, little-endian int32.
        """
        for one in self._loaded | dict.fromkeys({adapter} & self._invocations.keys()):
            invocation, end = self._invocations[one], len(tokens)
            for _ in range(2):
                if (position := _last_place(tokens[:end], invocation)) is None:
                    break
                yield one, _put(one, tokens, position)
                end = position * TOKEN_BYTES + len(invocation) - TOKEN_BYTES

    def prefixes(self, adapter: str, prefix: bytes) -> Iterator[bytes]:
        """Yields how the keys of a text may begin, of its earlier turns and of what continues it.

        Keys of what continues it have no mark in it, if another invocation follows, or one at its last occurrence,
        or where an invocation begins that ends behind it. Those of earlier turns have one at any occurrence, and
        agree with the text as far as they go.

        O(bytes) for each.

        Args:
            adapter: digest of an activated LoRA.
            prefix: tokens of the text, little-endian int32.
        """
        yield prefix
        for position in self.places(adapter, prefix):
            yield _put(adapter, prefix, position)

    def places(self, adapter: str, prefix: bytes) -> list[int]:
        """Returns the positions of the marks in ``prefixes``. O(bytes). The arguments are those of ``prefixes``."""
        invocation = self._invocations[adapter]
        places = _places(prefix, invocation)
        for n_bytes in range(TOKEN_BYTES, min(len(invocation) - 1, len(prefix)) + 1, TOKEN_BYTES):
            if prefix.endswith(invocation[:n_bytes]):
                places.append((len(prefix) - n_bytes) // TOKEN_BYTES)
        return places

    def find(self, key: bytes | bytearray) -> list[tuple[int, Mark]]:
        """Returns the marks in a part of a key, with their positions in it. O(bytes); O(1) if keys have none.

        Raises:
            InvariantError: a number is the mark of no adapter that was ever loaded: a bug in radixkv.
        """
        if not self._marks:
            return []
        ids = np.frombuffer(key, "<i4")
        # -1 stands for no token: pages of states have such keys.
        places: list[int] = np.flatnonzero(ids < -1).tolist()
        try:
            return [(place, self._marks[ids.item(place)]) for place in places]
        except KeyError as error:
            raise InvariantError(
                f"a key has the mark {error.args[0]}, which no adapter has that was ever loaded here"
            ) from None

    def tokens(self, key: bytes | bytearray) -> bytes:
        """Returns the tokens of a part of a key. O(bytes)."""
        marks = self.find(key)
        if not marks:
            return bytes(key)
        tokens = bytearray(key)
        for place, mark in marks:
            tokens[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES] = mark.token
        return bytes(tokens)


def _number(adapter: str) -> int:
    return -2 - int(adapter[:_DIGEST_DIGITS], 16) % _N_MARKS


def _put(adapter: str, tokens: bytes, position: int) -> bytes:
    start = position * TOKEN_BYTES
    mark = _number(adapter).to_bytes(TOKEN_BYTES, "little", signed=True)
    return tokens[:start] + mark + tokens[start + TOKEN_BYTES :]


def _last_place(tokens: bytes, invocation: bytes) -> int | None:
    """Returns the position at which the last occurrence begins; None without one."""
    place = tokens.rfind(invocation)
    while place > 0 and place % TOKEN_BYTES:
        place = tokens.rfind(invocation, 0, place + len(invocation) - 1)
    return None if place < 0 else place // TOKEN_BYTES


def _places(tokens: bytes, invocation: bytes) -> list[int]:
    """Returns the positions at which all occurrences begin, which may overlap. O(bytes)."""
    if len(tokens) < len(invocation):
        return []
    ids, sought = np.frombuffer(tokens, "<i4"), np.frombuffer(invocation, "<i4")
    return np.flatnonzero((sliding_window_view(ids, len(sought)) == sought).all(axis=1)).tolist()
