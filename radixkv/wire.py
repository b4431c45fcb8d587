"""The messages between the frontend and the runtime process.

Frames are msgpack of tagged structs, over a ROUTER socket (the runtime, which binds) and a DEALER socket (the
frontend) on an ``ipc://`` path inside a private folder. The first message is the frontend's ``Hello``; the runtime
answers ``Ready`` once the model is loaded. After that every ``Submit`` id gets exactly one ``Done`` or ``Failed``.
Before a ``Done``, each choice has ended in a ``Tokens`` item, unless the request was cancelled.

The runtime sends all frames of a turn as one multipart message, so a request's last tokens and its ``Done`` arrive
together.

Two messages are sent outside the socket, each as one JSON line: ``Start`` on the runtime's standard input, and
``Fatal`` on its standard output. docs/wire.md shows a session.
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
from radixkv.stats import Stats

WIRE_VERSION = 15
"""Increased with every change of a message; both sides must have the same version."""

MAX_FRAME_BYTES = 16 << 20
"""Larger frames are dropped unread."""

MAX_SOCKET_PATH_BYTES = 107

SOCKET_NAME = "runtime.sock"
LOCK_NAME = "runtime.lock"
"""A file beside the socket; the runtime locks it before it binds."""


class Start(msgspec.Struct, frozen=True):
    """The runtime's start line: what to serve, on which socket."""

    engine: EngineConfig
    folder: str
    """Path of the resolved checkpoint."""
    socket_path: str
    tokenizer_folder: str = ""
    """Path of the folder with the tokenizer; empty: ``folder``."""


class Fatal(msgspec.Struct, frozen=True):
    """The runtime's line on standard output before an error ends it."""

    kind: str
    """Class of the error: ``ConfigError``, ``CheckpointError`` or ``WireError``; any other means a bug."""
    text: str

    def error(self) -> RadixKVError:
        """Returns the error as an exception; a plain ``RadixKVError`` for other kinds."""
        kinds: dict[str, type[RadixKVError]] = {
            kind.__name__: kind for kind in (ConfigError, CheckpointError, WireError)
        }
        return kinds.get(self.kind, RadixKVError)(self.text)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The frontend's handshake, with its wire version."""

    version: int


class PromptPin(msgspec.Struct, frozen=True, array_like=True):
    """A prefix of a request's prompt that is pinned once the request has ended."""

    n_tokens: int
    """Length of the prefix; only its whole pages are pinned."""
    ttl_s: float
    """How long it is pinned, in seconds from the end of the request."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request."""

    id: str
    tokens: bytes
    """The prompt, as little-endian int32 ids."""
    sampling: SamplingParams
    cache_salt: str = ""
    """Requests with different salts share no page."""
    reads_cache: bool = True
    """False: the whole prompt is computed; it still enters the cache."""
    priority: int = 0
    """Waiting requests with a lower number are admitted first."""
    pins: tuple[PromptPin, ...] = ()
    """Prefixes of the prompt to pin when the request ends, unless it failed or had no token of its answer yet."""
    session_id: str = ""
    """The conversation that the request is a turn of; empty for none."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Aborts a request or one of its choices; ignored for an unknown id and for a finished choice.

    A request with beam search is aborted as a whole.
    """

    id: str
    choice: int | None = None
    """The choice to abort; None: all choices."""


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Empties the cache: makes all cached pages unreachable. Answered by ``Flushed``."""

    id: str


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Asks how much of a prompt is cached, and why no more. Answered by ``Explained``; changes nothing."""

    id: str
    tokens: bytes
    """The prompt, as little-endian int32 ids."""
    cache_salt: str = ""
    contents: bool = True
    """False: the answer has page granularity only, and says nothing about other salts."""


class Match(msgspec.Struct, frozen=True, tag=True):
    """Asks how much of some prompts each tier has, and for the load. Answered by ``Matched``; changes nothing."""

    id: str
    prompts: tuple[bytes, ...]
    """The prompts, each as little-endian int32 ids."""
    cache_salt: str = ""


class Outline(msgspec.Struct, frozen=True, tag=True):
    """Asks for the largest nodes of each tier's tree. Answered by ``Outlined``; changes nothing."""

    id: str
    contents: bool = True
    """False: the answer has no tokens."""


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Pins what is cached of a prompt, so that it is evicted after everything else. Answered by ``Pinned``."""

    id: str
    tokens: bytes
    """The prompt, as little-endian int32 ids."""
    ttl_s: float
    """How long to pin it, in seconds; 0 ends the pin of exactly this prompt."""
    cache_salt: str = ""


class Invalidate(msgspec.Struct, frozen=True, tag=True):
    """Drops what is cached of all sequences that begin with some tokens. Answered by ``Invalidated``."""

    id: str
    tokens: bytes
    """The beginning, as little-endian int32 ids; at least one page. Empty: everything with this salt."""
    cache_salt: str = ""


class CloseSession(msgspec.Struct, frozen=True, tag=True):
    """Ends a session: what only it has cached is evicted first. Answered by ``SessionClosed``.

    ``Failed`` with ``session_not_found`` if no request had this id, or the session was closed or forgotten.
    """

    id: str
    session_id: str
    cache_salt: str = ""
    """That of the session's requests."""


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Asks for the counters. Answered by ``Stats``."""

    id: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Makes the runtime refuse new requests, finish the others and exit."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. Has the sizes of model, pool and steps."""

    version: int
    vocab_size: int
    max_model_len: int
    page_size: int
    n_pages: int
    max_num_seqs: int
    """Maximum rows of a step."""
    max_num_batched_tokens: int
    """Maximum tokens of a step."""
    device: str
    """``cpu``, or the GPU's name."""
    dtype: str
    """The dtype of activations."""
    n_host_slots: int | None = None
    """Pages that the host tier will hold once its memory is prepared; None without a host tier."""
    has_disk: bool = False
    """Whether there is a disk tier behind the host tier."""
    kv_cache_dtype: str | None = None
    """The dtype of K and V; None: that of activations."""
    holds_whole_requests: bool = True
    """Whether the pool must hold all tokens of a request. False if a request frees its pages behind every layer's
    window while it runs, and the pool holds the others."""

    @property
    def max_prompt_and_answer(self) -> int:
        """Maximum tokens of a prompt and its output together; the KV of the last token needs no page."""
        if not self.holds_whole_requests:
            return self.max_model_len
        return min(self.max_model_len, self.n_pages * self.page_size + 1)

    @property
    def pool_limit(self) -> str | None:
        """The reason why the context is shorter than ``max_model_len``; None if it is not."""
        if self.max_prompt_and_answer == self.max_model_len:
            return None
        n_tokens = self.n_pages * self.page_size
        return f"the pool holds {n_tokens} tokens, fewer than max_model_len {self.max_model_len}"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position, from the logits before bias, penalties and temperature."""

    logprob: float
    """Logprob of the token itself."""
    rank: int
    """Rank of the token, from 1 for the most likely."""
    top_ids: bytes
    """The most likely tokens, most likely first and ties by id, as little-endian int32."""
    top_logprobs: bytes
    """Logprobs of ``top_ids``, as little-endian float32."""


class NewTokens(msgspec.Struct, frozen=True, array_like=True):
    """The new tokens of one choice, and its finish reason."""

    id: str
    tokens: bytes
    """Little-endian int32 ids."""
    choice: int = 0
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``; None if the choice goes on."""
    stop_token_id: int | None = None
    """The token that ended the choice, which is the last of ``tokens``; None if no token did."""
    logprobs: list[TokenLogprobs] | None = None
    """One item per token, if the request asks for logprobs."""
    cumulative_logprob: float | None = None
    """Sum of the logprobs of the tokens, if beam search found them: then they are the whole choice, and choice 0 is
    the best."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of a range of prompt tokens. Ranges come in order, before the first new token."""

    id: str
    start: int
    """Position of the first token of ``items``; at least 1, because the prompt's first token has no logprob."""
    items: list[TokenLogprobs]


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The new tokens and prompt logprobs of one step, for all requests."""

    items: list[NewTokens]
    prompts: list[PromptLogprobs] = []


class CacheMiss(msgspec.Struct, frozen=True, array_like=True):
    """Why a prompt lacked at least a page in the cache when its first row was scheduled. Lengths are in tokens."""

    reason: str
    """``differs``, ``evicted``, ``never_seen`` or ``other_namespace``, see ``tree.explain``; or ``not_read``: the
    request reads no cache."""
    n_matched: int
    """Length of the match in whole pages."""
    place: int = 0
    """A 64-bit digest of the tokens that match: equal for misses that end at the same page of the same text."""
    first_difference: int | None = None
    """Position of the first token that no cached sequence has, if other cached pages follow the match."""
    common: bytes = b""
    """The last tokens before the first difference, or else before the end of the match."""
    prompt: bytes = b""
    """The prompt's tokens after those."""
    cached: bytes = b""
    """The tokens at the same positions in the cached sequence with the longest match; empty if there is none."""
    n_elsewhere: int | None = None
    """For ``other_namespace``: the longest cached prefix in any other namespace."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the request is finished, or was cancelled. All its tokens came before."""

    id: str
    finish_reason: str
    """Finish reason of the choice that ended last."""
    n_prompt_tokens: int
    n_output_tokens: int
    """Sum over all choices. Only those of beams whose search was cancelled are counted without being sent."""
    n_cached_tokens: int
    """Prompt tokens that were not computed."""
    n_loaded_tokens: int
    """The part of ``n_cached_tokens`` that was loaded from the host tier for this request."""
    n_fetched_tokens: int
    """The part of ``n_loaded_tokens`` that came from disk before."""
    queue_time_s: float
    """Time from receipt until the first row was scheduled."""
    n_copied_tokens: int = 0
    """The part of ``n_cached_tokens`` that was copied from pages with other tokens after them."""
    miss: CacheMiss | None = None
    """None if less than a page of the prompt was not cached, or if requests share no pages."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the request failed; ``code`` identifies the class of ``radixkv.errors``."""

    id: str
    code: str
    text: str
    param: str | None = None


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Flush``."""

    id: str
    n_pages_freed: int
    n_pages_leased: int
    """Unreachable pages that running requests still lease; freed when those requests end."""


class Invalidated(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Invalidate``: pages that no request finds any more."""

    id: str
    n_on_device: int
    n_held: int
    """Those of the device that are freed later, when requests and copies that hold them end."""
    n_in_host: int | None = None
    """None without a host tier."""
    n_on_disk: int | None = None
    """None without a disk tier."""


class SessionClosed(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``CloseSession``: pages that are the first to be evicted now."""

    id: str
    n_on_device: int
    n_in_host: int | None = None
    """None without a host tier."""


class Explained(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Explain``; lengths and positions are in tokens.

    The fields from ``first_difference`` on are None if ``Explain.contents`` is False.
    """

    id: str
    n_tokens: int
    """Length of the prompt."""
    n_cached: int
    """Prompt tokens that a request would not compute.

    At most ``n_tokens - 1``, because the last token of a prompt is always computed. Only whole pages if
    ``Explain.contents`` is False.
    """
    reason: str
    """``whole``, ``differs``, ``evicted``, ``never_seen`` or ``other_namespace``; see ``tree.explain``."""
    first_difference: int | None = None
    """Position of the first token that no cached sequence has, if other cached pages follow the match."""
    token: int | None = None
    """The prompt's token at ``first_difference``."""
    cached_token: int | None = None
    """The token at ``first_difference`` in the cached sequence with the longest match."""
    n_cached_elsewhere: int | None = None
    """For ``other_namespace``: the longest cached prefix in any other namespace."""
    n_in_host: int = 0
    """Prompt tokens after those on the device that the host tier has. Part of ``n_cached`` if ``is_loaded``."""
    is_loaded: bool = False
    """Whether a request would load the tokens that the host tier has; else it would compute them."""
    min_loaded_tokens: float | None = None
    """Length above which a load is faster than computing, by measured rates; None without a host tier, or if its
    setting decides. Infinite: computing is always faster."""
    n_on_disk: int = 0
    """Prompt tokens after those on device and host tier that the disk tier lists. A page may turn out to be damaged
    when it is read, so they are no part of ``n_cached``."""
    is_demoted: bool = False
    """Whether the cached tokens are the first to be evicted: their session is closed, or has gone another way."""
    is_fetched: bool = False
    """Whether a request would fetch the tokens on disk, and then load them; else it would compute them."""
    n_pinned: int = 0
    """Leading tokens of the prompt that are pinned, on the device or in the host tier, whichever has more."""
    pin_seconds_left: float = 0.0
    """How long all of them stay pinned; 0 if there are none."""


class TierMatch(msgspec.Struct, frozen=True, array_like=True):
    """How much of a prompt the tiers have, in tokens of whole pages."""

    n_tokens: int
    """Length of the prompt."""
    n_on_device: int
    n_in_host: int
    """Tokens after those on the device that the host tier has."""
    n_on_disk: int
    """Tokens after those on device and host tier that the disk tier lists."""


class Matched(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Match``: the prompts in their order, and the load."""

    id: str
    prompts: tuple[TierMatch, ...]
    n_running: int
    n_waiting: int
    n_pages_free: int
    n_pages_evictable: int


class TreeNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of a tier's tree: a run of pages that continues its parent's run."""

    serial: int
    """Names the node as long as it is in the tree; a split gives the upper part a new one."""
    parent: int
    """Index of the parent in ``TierOutline.nodes``; -1 for the root of a namespace, which has no pages itself."""
    n_own_pages: int
    n_pages: int
    """Pages of the node and of the nodes below it, as far as these were visited."""
    n_leases: int
    """Requests and copies that hold it."""
    n_hits: int
    """Requests that have found it, as far as the eviction policy counts them."""
    age: int | None
    """Uses of the tree since that of the node; None if it is demoted, or if ages do not count."""
    is_pinned: bool
    n_more: int = 0
    """Nodes below it that are below no other node of the outline, and not in it; at least so many."""
    n_more_pages: int = 0
    """Pages of those of them that were visited."""
    namespace: str = ""
    """In a root: a label of its salt that does not reveal it, the same in all tiers; empty without a salt."""
    tokens: bytes = b""
    """The first tokens of the run; none without ``Outline.contents``."""


class TierOutline(msgspec.Struct, frozen=True):
    """The largest nodes of a tier's tree, parents first."""

    nodes: tuple[TreeNode, ...]
    n_pages: int
    """Pages of the tree."""
    n_not_visited: int
    """The part of them that was not visited, because the tree has too many nodes."""
    n_more_roots: int
    """Visited roots that are not among ``nodes``."""
    n_more_root_pages: int
    """Pages of those, with the nodes below them."""


class Outlined(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Outline``."""

    id: str
    device: TierOutline
    host: TierOutline | None = None
    """None without a host tier."""


class Pinned(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Pin``: what is pinned of the prompt now."""

    id: str
    n_tokens: int
    """Length of the prompt."""
    n_pinned: int
    """Leading tokens of the prompt that are pinned, on the device or in the host tier, whichever has more."""
    seconds_left: float
    """How long all of them stay pinned; 0 if there are none."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life: the runtime has sent nothing else for half a second."""


ToRuntime = (
    Hello | Submit | Cancel | Flush | Invalidate | CloseSession | Explain | Match | Outline | Pin | GetStats | Drain
)
FromRuntime = (
    Ready
    | Tokens
    | Done
    | Failed
    | Flushed
    | Invalidated
    | SessionClosed
    | Explained
    | Matched
    | Outlined
    | Pinned
    | Stats
    | Heartbeat
)

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()
_to_runtime: msgspec.msgpack.Decoder[ToRuntime] = msgspec.msgpack.Decoder(ToRuntime)
_from_runtime: msgspec.msgpack.Decoder[FromRuntime] = msgspec.msgpack.Decoder(FromRuntime)


def encode(message: ToRuntime | FromRuntime) -> bytes:
    """Encodes a message as one frame. O(size)."""
    return _encoder.encode(message)


def decode_to_runtime(frame: bytes) -> ToRuntime:
    """Decodes the frontend's message. Raises ``WireError``, or ``InvalidRequest`` for invalid sampling values."""
    return _decode(_to_runtime, frame)


def decode_from_runtime(frame: bytes) -> FromRuntime:
    """Decodes the runtime's message. Raises ``WireError``."""
    return _decode(_from_runtime, frame)


def endpoint(socket_path: str) -> str:
    """Returns the ZeroMQ endpoint of a socket file. Raises ``ConfigError`` if the path is too long."""
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {socket_path} has more than {MAX_SOCKET_PATH_BYTES} bytes; "
            "set TMPDIR to a shorter folder"
        )
    return f"ipc://{socket_path}"


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Packs token ids as little-endian int32. Raises ``OverflowError`` for an id outside int32."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(tokens: bytes | bytearray) -> list[int]:
    """Unpacks token ids from little-endian int32 bytes; their length must be a multiple of 4."""
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
