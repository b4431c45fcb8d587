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

from radixkv.errors import CheckpointError, ConfigError, RadixKVError, WireError
from radixkv.settings.config import MIN_BUDGET_PAGES, EngineConfig
from radixkv.wire.adapter_messages import AdapterCommand, AdapterLoaded, ServedAdapter
from radixkv.wire.cache_messages import CacheCommand, CacheReply
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.kv_budget import largest_budget, most_pages
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats
from radixkv.wire.table_messages import GetTables, Tabled

WIRE_VERSION = 39
"""Increased with every change of a message; both sides must have the same version."""

MAX_FRAME_BYTES = 16 << 20
"""Larger frames are dropped unread."""

MAX_SOCKET_PATH_BYTES = 107

SOCKET_NAME = "runtime.sock"
LOCK_NAME = "runtime.lock"
"""A file beside the socket; the runtime locks it before it binds.

It holds the number of the next batch of cache events, in 8 bytes, big-endian; nothing before the first batch.
"""


class Start(msgspec.Struct, frozen=True):
    """The runtime's start line: what to serve, on which socket."""

    engine: EngineConfig
    folder: str
    """Path of the resolved checkpoint."""
    socket_path: str
    tokenizer_folder: str = ""
    """Path of the folder with the tokenizer; empty: ``folder``."""
    first_event_number: int = 0
    """Number of the first batch of cache events. Above 0: a runtime before this one has published those before."""
    data_parallel_rank: int = 0
    """Number of the replica, which batches of cache events have."""
    data_parallel_size: int = 1
    """Replicas of the server, each of which needs GPUs of its own."""


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


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """What a request reports of its prompt's last position, in place of an answer."""

    token_ids: tuple[int, ...] = ()
    """Tokens whose logits to report, in this order; none: the hidden state after the last norm."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request."""

    id: str
    tokens: bytes
    """The prompt, as little-endian int32 ids."""
    sampling: SamplingParams
    namespace: CacheNamespace = CacheNamespace()
    """Whose KV it may share, with who has sent it and the adapter that changes the model."""
    reads_cache: bool = True
    """False: the whole prompt is computed; it still enters the cache."""
    priority: int = 0
    """Waiting requests with a lower number are admitted first."""
    pins: tuple[PromptPin, ...] = ()
    """Prefixes of the prompt to pin when the request ends, unless it failed or had no token of its answer yet."""
    session_id: str = ""
    """The conversation that the request is a turn of; empty for none."""
    is_canary: bool = False
    """The server's own check of the cache: no statistics count it. If it does not read the cache, it is computed
    without the tree: on pages of its own, which no tier gets."""
    prediction: bytes = b""
    """What the client expects the answer to be like, as little-endian int32 ids: a source of drafts, which changes
    no answer."""
    pooling: Pooling | None = None
    """What to report of the prompt; None: it has an answer. With it ``sampling`` has its defaults."""
    may_pause: bool = False
    """Whether a ``BeginPause`` may follow its end. Only with one choice."""
    resumes: str = ""
    """Id of the ``Submit`` from whose answer the prompt goes on; empty if that is not known."""
    expected_pause_s: float | None = None
    """How long the pause after its answer takes, as the client says; None: that is learnt."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Aborts a request or one of its choices; ignored for an unknown id and for a finished choice.

    A request with beam search is aborted as a whole.
    """

    id: str
    choice: int | None = None
    """The choice to abort; None: all choices."""


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
    """``cpu``, or the GPU's name; that of each rank."""
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
    has_drafts: bool = False
    """Whether answers are computed with speculative decoding, so that predictions are of use."""
    tensor_parallel_size: int = 1
    """Ranks that compute the model together, each on a device of its own."""
    state_block_tokens: int = 0
    """The distance of states of recurrent layers, or of tails of window pages, from which alone a match goes on; 0
    if the model needs none."""
    adapters: tuple[ServedAdapter, ...] = ()
    """The adapters that requests may ask for from the start on."""

    @property
    def devices(self) -> str:
        """All devices as text: ``cpu``, or ``2 x NVIDIA H200``."""
        return self.device if self.tensor_parallel_size == 1 else f"{self.tensor_parallel_size} x {self.device}"

    @property
    def max_prompt_and_answer(self) -> int:
        """Maximum tokens of a prompt and its output together; the KV of the last token needs no page."""
        if not self.holds_whole_requests:
            return self.max_model_len
        return min(self.max_model_len, self.n_pages * self.page_size + 1)

    def max_prompt_and_answer_of(self, n_prompt: int, kv_budget: int | None) -> int:
        """Returns ``max_prompt_and_answer`` for a request that may have a budget of its own.

        Args:
            n_prompt: tokens of the prompt.
            kv_budget: of the request; 0 or None: the pool must hold all its tokens.
        """
        if kv_budget and most_pages(n_prompt, kv_budget, self.page_size) <= self.n_pages:
            return self.max_model_len
        return self.max_prompt_and_answer

    def limit_reason(self, n_prompt: int, kv_budget: int | None) -> str | None:
        """Returns why ``max_prompt_and_answer_of`` is less than ``max_model_len``; None if it is not.

        Args:
            n_prompt: tokens of the prompt.
            kv_budget: of the request; 0 or None: it has none.
        """
        if self.max_prompt_and_answer_of(n_prompt, kv_budget) == self.max_model_len:
            return None
        largest = largest_budget(n_prompt, self.n_pages, self.page_size) if kv_budget else 0
        if largest < MIN_BUDGET_PAGES * self.page_size:
            return self.pool_limit
        return f"{self.pool_limit}; a kv_budget of at most {largest} lets it be longer"

    @property
    def max_pooled(self) -> int:
        """Maximum tokens of a prompt without an output."""
        if not self.holds_whole_requests:
            return self.max_model_len
        return min(self.max_model_len, self.n_pages * self.page_size)

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
    pooled: bytes | None = None
    """What a request with ``pooling`` reports, as little-endian float32, once, with its end and without tokens."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of a range of prompt tokens. Ranges come in order, before the first new token."""

    id: str
    start: int
    """Position of the first token of ``items``; at least 1, because the prompt's first token has no logprob."""
    items: list[TokenLogprobs]


class ComputedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """What the cache gave and got of a prompt, known once that is computed."""

    id: str
    cache_use: CacheUse


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The new tokens and prompt logprobs of one step, for all requests."""

    items: list[NewTokens]
    prompt_logprobs: list[PromptLogprobs] = []
    computed: list[ComputedPrompt] = []
    """What the cache did for each prompt, once, with the first token."""


class CacheMiss(msgspec.Struct, frozen=True, array_like=True):
    """Why a prompt lacked at least a page in the cache when its first row was scheduled. Lengths are in tokens."""

    reason: str
    """``differs``, ``evicted``, ``never_seen``, ``evicted_or_never_seen``, ``other_namespace``, ``invocation`` or
    ``no_state``, see ``tree.explain``; or ``not_read``: the request reads no cache."""
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
    """For ``other_namespace``: the longest cached prefix in any other namespace. For ``invocation``: that
    with another place of the invocation, if it is longer than the match."""
    is_new: bool = False
    """For ``differs`` and ``evicted_or_never_seen``: whether the prompt, as far as it was compared, has no page of
    text in common with the cache behind the place where its match ends."""
    is_other_adapter: bool = False
    """For ``other_namespace``: whether that namespace differs in the adapter alone. For ``invocation``: whether the
    cached page is another adapter's, or the model's."""


class DraftUse(msgspec.Struct, frozen=True, array_like=True):
    """What became of a request's drafts, in tokens."""

    n_accepted: int = 0
    """The part of the answers that was guessed before it was sampled."""
    n_rejected: int = 0
    """Guesses that are no part of the answers."""

    def __add__(self, other: DraftUse) -> DraftUse:
        return DraftUse(self.n_accepted + other.n_accepted, self.n_rejected + other.n_rejected)


class KVEvictionUse(msgspec.Struct, frozen=True, array_like=True):
    """What became of the KV of a request with a ``kv_budget``, in tokens."""

    kv_budget: int
    """The most tokens of which its rows read the KV."""
    n_skipped: int = 0
    """Tokens whose KV its later rows did not read, though it stayed in the cache."""
    n_freed: int = 0
    """Tokens whose KV was freed while the request ran."""

    def __add__(self, other: KVEvictionUse) -> KVEvictionUse:
        """Adds what another prompt with the same budget has dropped."""
        return KVEvictionUse(self.kv_budget, self.n_skipped + other.n_skipped, self.n_freed + other.n_freed)

    @property
    def fields(self) -> dict[str, int]:
        """What responses say of it."""
        return {"kv_budget": self.kv_budget, "skipped_tokens": self.n_skipped, "freed_tokens": self.n_freed}


class Done(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the request is finished, or was cancelled. All its tokens came before."""

    id: str
    finish_reason: str
    """Finish reason of the choice that ended last."""
    n_prompt_tokens: int
    n_output_tokens: int
    """Sum over all choices. Only those of beams whose search was cancelled are counted without being sent."""
    cache_use: CacheUse
    queue_time_s: float
    """Time from receipt until the first row was scheduled."""
    miss: CacheMiss | None = None
    """None if less than a page of the prompt was not cached, or if requests share no pages."""
    load_interval_s: tuple[float, float] | None = None
    """From when to when, since receipt, the request waited for pages from other tiers; None if it did not."""
    drafts: DraftUse | None = None
    """Sum over all choices; None without speculative decoding."""
    kv_eviction: KVEvictionUse | None = None
    """None for a request without a ``kv_budget``, whose answer is exact."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the request failed; ``code`` identifies the class of ``radixkv.errors``."""

    id: str
    code: str
    text: str
    param: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life: the runtime has sent nothing else for half a second."""


ToRuntime = Hello | Submit | Cancel | CacheCommand | AdapterCommand | GetTables | GetStats | Drain
FromRuntime = Ready | Tokens | Done | Failed | CacheReply | AdapterLoaded | Tabled | Stats | Heartbeat

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
