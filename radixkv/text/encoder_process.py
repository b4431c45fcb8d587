"""The process that encodes texts with a tokenizer of unknown costs: ``python -m radixkv.text.encoder_process``.

``GuardedEncoder`` starts it. Standard input is a socket, whose first frame is the ``tokenizer.json``. The kernel
ends the process when a request takes longer than its deadline or needs too much memory.
"""

from __future__ import annotations

import signal
import socket

import msgspec
import tokenizers

from radixkv.processes.process_limits import limit_memory
from radixkv.text.encoder_messages import EncodedText, EncodeTexts, receive_frame, send_frame
from radixkv.text.panics import is_failure
from radixkv.text.segment_cache import pack_ids

MEMORY_BYTES = 2 << 30
"""Memory that it may take beyond what it has with the tokenizer."""
MAX_TOKENS_PER_CHARACTER = 32
"""A byte-level tokenizer makes up to 4, or some 20 of a character that a normalizer decomposes."""
MAX_ADDED_TOKENS = 256
"""Tokens beyond that, such as the beginning of sequence."""


def main() -> None:
    """Encodes until the other end closes the connection."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = socket.socket(fileno=0)
    try:
        backend = tokenizers.Tokenizer.from_str(receive_frame(connection).decode())
        backend.no_truncation()
        backend.no_padding()
        limit_memory(MEMORY_BYTES)
        send_frame(connection, b"")
        while True:
            request = msgspec.msgpack.decode(receive_frame(connection), type=EncodeTexts)
            signal.setitimer(signal.ITIMER_REAL, request.deadline_s)
            reply = msgspec.msgpack.encode(_encode(backend, request))
            signal.setitimer(signal.ITIMER_REAL, 0)
            send_frame(connection, reply)
    except (EOFError, OSError):
        pass


def _encode(backend: tokenizers.Tokenizer, request: EncodeTexts) -> list[EncodedText]:
    encoded = []
    for text in request.texts:  # one by one, so that each has its own error
        try:
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=request.adds_special_tokens)
        except BaseException as error:
            if not is_failure(error):
                raise
            encoded.append(EncodedText(error=str(error)))
            continue
        n_tokens = len(encoding)
        if n_tokens > MAX_TOKENS_PER_CHARACTER * len(text) + MAX_ADDED_TOKENS:
            encoded.append(EncodedText(error=f"it makes {n_tokens} tokens of {len(text)} characters"))
        elif request.limit is not None and n_tokens > request.limit:
            encoded.append(EncodedText(n_tokens))
        else:
            encoded.append(EncodedText(n_tokens, pack_ids(encoding.ids)))
    return encoded


if __name__ == "__main__":
    main()
