"""Encodes texts in a process that can be given up."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

import msgspec

from radixkv.errors import ContextLengthExceeded, InvalidRequest, context_length_exceeded
from radixkv.text.encoder_messages import EncodedText, EncodeTexts, receive_frame, send_frame
from radixkv.text.panics import TokenizerFailed

START_S = 60.0
"""How long the process may take to start, and to load the tokenizer."""
DEADLINE_S = 3.0
"""How long the process may take for texts without any length."""
MIN_CHARACTERS_PER_S = 50_000
"""Tokenizers encode millions of characters in a second; on a busy machine some hundred thousand."""
_SPARE_S = 2.0
"""How much later than the process itself this one sees that the deadline is over."""


class GuardedEncoder:
    """Encodes with a tokenizer of unknown costs, within limits of time, memory and output. Thread-safe.

    The process is started when it is needed first, and again after a text for which it had to be given up. It ends
    when this object does. One call at a time is served.

    Args:
        layout: the text of ``tokenizer.json``.
    """

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._close: Callable[[], object] = lambda: None  # there is no process

    def encode_batch(
        self, texts: Sequence[str], limit: int | None, *, adds_special_tokens: bool
    ) -> list[bytes | InvalidRequest]:
        """Returns the little-endian int32 ids of each text, or its error.

        If the process is given up for one of several texts, all are encoded again, one by one.
        """
        with self._lock:
            results = self._try(texts, limit, adds_special_tokens)
            if isinstance(results, list):
                return results
            if len(texts) == 1:
                return [results]
            return [
                one[0] if isinstance(one, list) else one
                for one in (self._try([text], limit, adds_special_tokens) for text in texts)
            ]

    def _try(
        self, texts: Sequence[str], limit: int | None, adds_special_tokens: bool
    ) -> list[bytes | InvalidRequest] | TokenizerFailed:
        """Returns a result for each text, or why the process was given up."""
        n_characters = sum(map(len, texts))
        deadline_s = DEADLINE_S + n_characters / MIN_CHARACTERS_PER_S
        request = EncodeTexts(list(texts), deadline_s, adds_special_tokens, limit)
        try:
            connection = self._open()
            connection.settimeout(deadline_s + _SPARE_S)
            send_frame(connection, msgspec.msgpack.encode(request))
            encoded = msgspec.msgpack.decode(receive_frame(connection), type=list[EncodedText])
        except (OSError, EOFError) as error:
            self._give_up()
            reason = f"{n_characters} characters take more than {deadline_s:.0f} s, or too much memory"
            return TokenizerFailed.of("encode the text", error if isinstance(error, ConnectionError) else reason)
        return [_result(one, limit) for one in encoded]

    def _open(self) -> socket.socket:
        if self._connection is not None:
            return self._connection
        own, other = socket.socketpair()
        with other:
            process = subprocess.Popen(
                [sys.executable, "-m", "radixkv.text.encoder_process"],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic writes a page there
                start_new_session=True,
            )
        self._connection = own
        self._close = weakref.finalize(self, _end, own, process)
        own.settimeout(START_S)
        send_frame(own, self._layout.encode())
        receive_frame(own)
        return own

    def _give_up(self) -> None:
        self._connection = None
        self._close()


def _result(encoded: EncodedText, limit: int | None) -> bytes | ContextLengthExceeded | TokenizerFailed:
    if encoded.ids is not None:
        return encoded.ids
    if encoded.error:
        return TokenizerFailed.of("encode the text", encoded.error)
    return context_length_exceeded(f"it has {encoded.n_tokens} tokens", limit, param="prompt")


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
