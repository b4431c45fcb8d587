"""The messages between the frontend and the runtime process; nothing else crosses.

Frames are msgpack of tagged structs over ROUTER (the runtime, which binds) and DEALER (the frontend) on an
``ipc://`` path inside a private directory. The first message is the frontend's ``Hello``; the runtime answers
``Ready`` once the model is loaded. After that every ``Submit`` id ends with exactly one ``Done`` or ``Failed``;
before a ``Done`` each choice has ended in ``Tokens``, unless the request was cancelled.
Frames that the runtime sends together are one multipart message, so that tokens and their end come together.

Two messages cross outside the socket, each as one JSON line: ``Start`` on the runtime's standard input, and
``Fatal``, the reason why it ends, on its standard output. docs/wire.md shows a session.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from radixkv.config import EngineConfig
from radixkv.errors import CheckpointError, ConfigError, RadixKVError, WireError
from radixkv.sampling import SamplingParams

WIRE_VERSION = 6
"""Raised with every change of a message; both sides must have the same."""

MAX_FRAME_BYTES = 16 << 20
"""A larger frame is dropped unread."""

MAX_SOCKET_PATH_BYTES = 107

SOCKET_NAME = "runtime.sock"
LOCK_NAME = "runtime.lock"
"""Beside the socket; the runtime locks it before it binds."""


class Start(msgspec.Struct, frozen=True):
    """The runtime's first input: what to serve, and where."""

    engine: EngineConfig
    folder: str
    """The resolved checkpoint."""
    socket_path: str


class Fatal(msgspec.Struct, frozen=True):
    """The runtime's only output: why it ends."""

    kind: str
    """``ConfigError``, ``CheckpointError`` or ``WireError``; anything else is a fault of the runtime itself."""
    text: str

    def error(self) -> RadixKVError:
        """The error it stands for."""
        kinds: dict[str, type[RadixKVError]] = {
            kind.__name__: kind for kind in (ConfigError, CheckpointError, WireError)
        }
        return kinds.get(self.kind, RadixKVError)(self.text)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The handshake: the frontend names its wire version."""

    version: int


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request."""

    id: str
    tokens: bytes
    """The prompt: little-endian int32 ids."""
    sampling: SamplingParams
    cache_salt: str = ""
    """Requests with different salts share no page."""
    reads_cache: bool = True
    """False: compute the whole prompt, and fill the cache with it."""
    priority: int = 0
    """Waiting requests of a lower number go first."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """No more of the answer is wanted; an unknown id, and a choice that has ended, are ignored."""

    id: str
    choice: int | None = None
    """The one choice that ends; None: the request, with all of them."""


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Make all that is cached unreachable; answered by ``Flushed``."""

    id: str


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Why is no more of these tokens cached? Answered by ``Explained``; changes nothing."""

    id: str
    tokens: bytes
    cache_salt: str = ""
    contents: bool = True
    """False: tell nothing finer than pages, and nothing of other salts."""


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Answered by ``Stats``."""

    id: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new request, finish the running ones, then exit."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; what the frontend needs to know of it."""

    version: int
    vocab_size: int
    max_model_len: int
    page_size: int
    n_pages: int
    max_num_seqs: int
    """Most rows a step,"""
    max_num_batched_tokens: int
    """and most tokens."""
    device: str
    """``cpu``, or the GPU's name."""
    dtype: str
    """What the model computes in."""

    @property
    def max_prompt_and_answer(self) -> int:
        """Most tokens of a prompt and its answer together; the last token of an answer needs no page."""
        return min(self.max_model_len, self.n_pages * self.page_size + 1)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely one token was, by the logits before bias, penalties and temperature."""

    logprob: float
    rank: int
    """1: no token was likelier."""
    top_ids: bytes
    """The likeliest tokens, likeliest first, as little-endian int32; of equal ones the smaller id first."""
    top_logprobs: bytes
    """Theirs, little-endian float32."""


class NewTokens(msgspec.Struct, frozen=True, array_like=True):
    """What one choice gained in a step, and its end if that is known."""

    id: str
    tokens: bytes
    """Little-endian int32 ids."""
    choice: int = 0
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None while more may come."""
    stop_token_id: int | None = None
    """The token that ended it, if one did; the last of ``tokens``."""
    logprobs: list[TokenLogprobs] | None = None
    """One a token, if the request asks for them."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a stretch of a request's prompt was; stretches come in order, before the first token."""

    id: str
    start: int
    """Position of the first token that is scored; the prompt's first token never is."""
    items: list[TokenLogprobs]


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """All that a step produced; one message a step."""

    items: list[NewTokens]
    prompts: list[PromptLogprobs] = []


class Done(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the request ended. Its last tokens came before."""

    id: str
    finish_reason: str
    """Of the choice that ended last."""
    n_prompt_tokens: int
    n_output_tokens: int
    """Of all choices."""
    n_cached_tokens: int
    """Prompt tokens that were not computed."""
    queue_time_s: float
    """From receipt until the first row was scheduled."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the request ended without an answer; ``code`` as in ``errors``."""

    id: str
    code: str
    text: str
    param: str | None = None


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """What a ``Flush`` did."""

    id: str
    n_pages_freed: int
    n_pages_leased: int
    """Pages that running requests still hold; unreachable, and free once those end."""


class Explained(msgspec.Struct, frozen=True, tag=True):
    """How much of a prompt is cached, and why no more; lengths and places are in tokens."""

    id: str
    n_tokens: int
    n_cached: int
    """The longest cached prefix, in whole pages."""
    reason: str
    """``whole``, ``differs``, ``evicted``, ``never_seen`` or ``other_namespace``; as in ``tree.explain``."""
    first_difference: int | None = None
    """Place of the first token that no cached sequence has, where other pages follow the match. This and what
    follows is None where contents were not asked for."""
    token: int | None = None
    """The prompt's token there,"""
    cached_token: int | None = None
    """and the one that the nearest cached sequence has instead."""
    n_cached_elsewhere: int | None = None
    """Of ``other_namespace``: how much the namespace that caches most of it has."""


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counters since start (``*_total``, ``*_seconds``) and gauges of this moment."""

    id: str
    n_running: int
    n_waiting: int
    n_pages: int
    n_pages_free: int
    n_pages_evictable: int
    prefix_queries_total: int
    """Prompt tokens of requests whose first prefill ended."""
    prefix_hits_total: int
    """Those of them that were not computed."""
    prompt_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    pages_evicted_total: int
    steps_total: int
    step_seconds: float
    """Wall time of the loop's turns."""
    schedule_seconds: float
    """Of that, planning steps and taking their results, cache work included."""
    cache_seconds: float
    """Tree and pool work. Of ``schedule_seconds``, but for what a ``Flush`` or a ``Cancel`` does at once, which
    counts here only, and for undoing failed steps, which counts in ``step_seconds`` too."""
    attention_seconds: float
    """What attention took on the device, beside all this: ``cache_seconds / attention_seconds`` is what managing
    memory costs."""
    frames_dropped_total: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The runtime's loop is turning."""


ToRuntime = Hello | Submit | Cancel | Flush | Explain | GetStats | Drain
FromRuntime = Ready | Tokens | Done | Failed | Flushed | Explained | Stats | Heartbeat

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()
_to_runtime: msgspec.msgpack.Decoder[ToRuntime] = msgspec.msgpack.Decoder(ToRuntime)
_from_runtime: msgspec.msgpack.Decoder[FromRuntime] = msgspec.msgpack.Decoder(FromRuntime)


def encode(message: ToRuntime | FromRuntime) -> bytes:
    """One frame. O(size)."""
    return _encoder.encode(message)


def decode_to_runtime(frame: bytes) -> ToRuntime:
    """The frontend's message in a frame. Raises ``WireError``, or ``InvalidRequest`` for bad sampling values."""
    return _decode(_to_runtime, frame)


def decode_from_runtime(frame: bytes) -> FromRuntime:
    """The runtime's message in a frame. Raises ``WireError``."""
    return _decode(_from_runtime, frame)


def endpoint(socket_path: str) -> str:
    """ZeroMQ's name for a socket file. Raises ``ConfigError`` if the path is longer than the system takes."""
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {socket_path} has more than {MAX_SOCKET_PATH_BYTES} bytes; "
            "set TMPDIR to a shorter folder"
        )
    return f"ipc://{socket_path}"


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises ``OverflowError`` for an id that does not fit."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    """The ids in little-endian int32 bytes, whose length is a multiple of 4."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _decode(decoder: msgspec.msgpack.Decoder[MessageT], frame: bytes) -> MessageT:
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame has {len(frame)} bytes; at most {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame of {len(frame)} bytes is not a message: {error}") from error
