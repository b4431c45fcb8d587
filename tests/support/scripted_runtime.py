"""A runtime that echoes the prompt over and over, behind the real process entry."""

from __future__ import annotations

import asyncio
import struct
import sys
import time
import types
from array import array
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from radixkv.wire.cache_messages import (
    BeginPause,
    CloseSession,
    EndPause,
    Explain,
    Explained,
    Flush,
    Flushed,
    GetStored,
    Invalidate,
    Invalidated,
    Match,
    Matched,
    Outline,
    Outlined,
    PauseBegun,
    PauseEnded,
    Pin,
    Pinned,
    SessionClosed,
    Stored,
    TierMatch,
    TierOutline,
    TreeNode,
)
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import (
    WIRE_VERSION,
    Cancel,
    ComputedPrompt,
    Done,
    DraftUse,
    Drain,
    Failed,
    FromRuntime,
    GetStats,
    NewTokens,
    PromptLogprobs,
    Ready,
    Submit,
    TokenLogprobs,
    Tokens,
    pack_tokens,
)
from radixkv.wire.stats import (
    AdapterStats,
    DiskStats,
    DraftStats,
    HostStats,
    PauseKindStats,
    PauseStats,
    ReplicaStats,
    SharedStoreStats,
    SourceStats,
    StateStats,
    Stats,
    TenantStats,
    WindowStats,
)
from radixkv.wire.table_messages import ChoiceTable, GetTables, PoolUse, RequestTables, Tabled, TablePage

if TYPE_CHECKING:  # processes that only run a script start in half the time without these
    import httpx

    from radixkv.frontend.runtime_client import RuntimeClient

HOST = HostStats(
    n_slots=200,
    n_slots_free=150,
    n_slots_pinned=25,
    page_bytes=1000,
    n_loading=2,
    pages_loaded_total=6,
    pages_stored_total=9,
    pages_evicted_total=3,
    load_seconds=0.5,
    store_seconds=0.75,
    copies_failed_total=1,
    loads_declined_total=4,
    fetches_declined_total=3,
    lookups_declined_total=2,
    load_seconds_per_token=0.001,
    compute_seconds_per_token=0.005,
    n_state_slots=12,
    n_state_slots_free=5,
    pages_loaded_ahead_total=5,
    pages_loaded_ahead_used_by_waiting_total=2,
)
"""Counters of a host tier."""
DISK = DiskStats(
    n_pages=70,
    n_bytes=77000,
    pages_fetched_total=5,
    pages_written_total=8,
    pages_lost_total=2,
    fetch_seconds=0.25,
    write_seconds=1.25,
    fetch_seconds_per_token=0.002,
)
"""Counters of a disk tier."""
DRAFTS = DraftStats(10, 60, 25, 9, {"prompt": SourceStats(40, 20), "answers": SourceStats(20, 5)}, (10, 8, 7, 0))
"""Counters of drafts."""
STATES = StateStats(
    n_slots=20, n_slots_free=4, saved_total=40, hits_total=33, evicted_total=24, missed_tokens_total=512
)
"""Counters of states of recurrent layers."""
PAUSES = PauseStats(
    n_pauses=3,
    n_spared_tokens=900,
    returns_total=10,
    returns_on_device_total=8,
    given_up_total=2,
    kinds={
        "\0search": PauseKindStats(2, 8, 6, 2, median_s=0.52, p90_s=2.0),
        "": PauseKindStats(1, 2, 2, 0, median_s=12.3, p90_s=40.0),
        "batch\0f\0g": PauseKindStats(0, 0, 0, 1),
    },
)
"""Counters of pauses between turns."""
ADAPTERS = AdapterStats(n_adapters=2, n_bytes=84_000_000, n_in_slots=1, slot_loads_total=3, n_waiting=4)
"""Gauges of adapters."""
WINDOWS = WindowStats(
    n_window_pages=30,
    n_window_pages_evictable=12,
    n_slabs=50,
    n_slabs_taken=22,
    n_tails=6,
    tails_kept_total=41,
    hits_total=35,
    evicted_total=25,
    missed_tokens_total=513,
)
"""Counters of window pages."""
TENANTS = {"search": TenantStats(2, 1, 500, 20), "batch": TenantStats(1, 6, 250)}
"""Counters of tenants, of which the second has no share of pages."""
REPLICAS = {
    "0": ReplicaStats(is_up=True, n_pages=64, placements_total={"prefix": 7, "load": 2}),
    "1": ReplicaStats(is_up=False, n_restarts=1),
}
"""Counters of replicas, of which the second is down."""
SHARED_STORE = msgspec.structs.replace(
    DISK, shared=SharedStoreStats(is_away=True, failures_total=3, lookups_total=11, look_up_seconds=0.125)
)
"""Counters of a store that servers share."""
EOS = 256
VOCAB_SIZE = 300
MAX_MODEL_LEN = 512
FAILS_AT_ONCE = 280
FAILS_AFTER_THREE = 281
KILLS = 283
"""Prompts that begin with one of these tokens are refused, fail, or kill the runtime."""


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose token i is character i of the byte-level alphabet; token 256 ends an answer."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))


@dataclass
class _Choice:
    n: int = 0
    finish_reason: str | None = None


@dataclass
class _Running:
    submit: Submit
    prompt: list[int]
    n_prompt_logprobs: int = 1
    choices: list[_Choice] = field(default_factory=list)

    @property
    def n(self) -> int:
        return sum(choice.n for choice in self.choices)

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)


def scripted_logprobs(token: int, count: int) -> TokenLogprobs:
    """Returns log-probabilities in which the token is second likeliest, after the token of the next id."""
    others = [(token + offset) % VOCAB_SIZE for offset in range(2, 20)]
    ids = [(token + 1) % VOCAB_SIZE, token, *others][:count]
    logprobs = struct.pack(f"<{count}f", *(-0.5 * rank for rank in range(1, count + 1)))
    return TokenLogprobs(-1.0, 2, pack_tokens(ids), logprobs)


@dataclass
class ScriptedLoop:
    """Replaces ``runtime.loop.Loop``. Choice ``k`` echoes the prompt from its token ``k`` on."""

    step_s: float = 0.0
    is_held: bool = False
    is_full: bool = False
    """Whether all requests are refused, as by a full queue."""
    is_empty: bool = False
    """Whether nothing of any prompt is cached."""
    answers: list[list[int]] = field(default_factory=list)
    """What the choices generate one after the other, each up to its last token; none: the echo."""
    may_fail: bool = True
    """Whether requests of ``FAILS_AFTER_THREE`` fail; if not, they stay at three tokens."""
    fails_cancelled_after: int | None = None
    """Tokens after which requests wait until their choices are cancelled, and fail then; None: neither."""
    running: dict[str, _Running] = field(default_factory=dict)
    submitted: list[Submit] = field(default_factory=list)
    paused: list[BeginPause] = field(default_factory=list)
    ended_pauses: list[str] = field(default_factory=list)
    """Those that have ended because their chats went on elsewhere."""
    cancelled: list[str] = field(default_factory=list)
    explained: list[Explain] = field(default_factory=list)
    matched: list[Match] = field(default_factory=list)
    outlined: list[Outline] = field(default_factory=list)
    tabled: list[GetTables] = field(default_factory=list)
    invalidated: list[Invalidate] = field(default_factory=list)
    pinned: list[Pin] = field(default_factory=list)
    refuses_pins: bool = False
    """Whether pins fail, as with a budget of 0."""
    refuses_grammars: bool = False
    """Whether requests with structured outputs fail, as if these could not be compiled."""
    host: HostStats | None = None
    """Counters of a host tier, from which every request has loaded one token; None: there is no host tier."""
    disk: DiskStats | None = None
    """Counters of a disk tier, from which that token came; None: there is no disk tier."""
    shared_store: DiskStats | None = None
    """Counters of a shared store; None: there is none."""
    joint: TierOutline | None = None
    """The tree of device and host tier together."""
    drafts: DraftStats | None = None
    """Counters of drafts."""
    states: StateStats | None = None
    """Counters of states."""
    pauses: PauseStats | None = None
    """Counters of pauses."""
    windows: WindowStats | None = None
    """Counters of window pages."""
    adapters: AdapterStats | None = None
    """Gauges of adapters."""
    draft_use: DraftUse | None = None
    """What becomes of the drafts of each request."""
    tenants: dict[str, TenantStats] = field(default_factory=dict)
    """Counters of tenants."""
    replicas: dict[str, ReplicaStats] = field(default_factory=dict)
    """Counters of replicas, as if this were several."""
    is_storing: bool = False
    """Whether a tier is said to get more of each prompt."""
    n_stored_asked: int = 0
    """How often it was asked for that."""
    is_waiting: bool = False
    seconds_for_arrivals: float = 0.0
    descriptors: tuple[int, ...] = ()

    def advance(self) -> None:
        """Nothing: there is no other tier."""

    def close(self) -> None:
        """Nothing: there is no device."""

    @property
    def ready(self) -> Ready:
        sizes = WIRE_VERSION, VOCAB_SIZE, MAX_MODEL_LEN, 16, 64, 256, 8192
        n_host_slots = None if self.host is None else self.host.n_slots
        has_drafts = self.drafts is not None
        return Ready(*sizes, "NVIDIA H200", "bfloat16", n_host_slots, self.disk is not None, has_drafts=has_drafts)

    @property
    def has_work(self) -> bool:
        return bool(self.running) and not self.is_held

    def receive(
        self,
        message: Submit
        | Cancel
        | Flush
        | Invalidate
        | CloseSession
        | Explain
        | Match
        | GetStored
        | Outline
        | Pin
        | BeginPause
        | EndPause
        | GetTables
        | GetStats
        | Drain,
    ) -> list[FromRuntime]:
        match message:
            case Submit():
                self.submitted.append(message)
                prompt = array("i", message.tokens).tolist()
                if self.is_full or prompt[0] == FAILS_AT_ONCE:
                    return [Failed(message.id, "queue_full", "as many requests wait as may", None)]
                if self.refuses_grammars and message.sampling.structured_outputs is not None:
                    return [Failed(message.id, "invalid_request", "no grammar has it", "structured_outputs")]
                choices = [_Choice() for _ in range(message.sampling.n)]
                self.running[message.id] = _Running(message, prompt, choices=choices)
            case Cancel():
                self.cancelled.append(message.id)
                return self._cancel(message)
            case Flush():
                return [Flushed(message.id, 3, 2)]
            case Invalidate():
                self.invalidated.append(message)
                n_in_host = None if self.host is None else 2
                return [Invalidated(message.id, 3, 1, n_in_host, None if self.disk is None else 4)]
            case CloseSession() if all(
                (one.session_id, one.namespace) != (message.session_id, message.namespace) for one in self.submitted
            ):
                return [Failed(message.id, "session_not_found", "there is no such session", "session_id")]
            case CloseSession():
                return [SessionClosed(message.id, 3, None if self.host is None else 2)]
            case Explain():
                self.explained.append(message)
                n_tokens = len(message.tokens) // 4
                pins = [pin.ttl_s for pin in self.pinned if pin.tokens == message.tokens]
                explained = Explained(message.id, n_tokens, 0 if self.is_empty else n_tokens // 2, "never_seen")
                if pins:
                    explained = msgspec.structs.replace(
                        explained, n_pinned=n_tokens // 2, pin_seconds_left=pins[-1], has_own_pin=True
                    )
                return [explained]
            case Match():
                self.matched.append(message)
                lengths = [len(tokens) // 4 for tokens in message.prompts]
                found = tuple(
                    TierMatch(n, *(0 if self.is_empty else n // part for part in (2, 4, 8))) for n in lengths
                )
                return [Matched(message.id, found, len(self.running), 7, 32, 16)]
            case GetStored():
                self.n_stored_asked += 1
                n_whole = len(message.tokens) // 4 // 16 * 16
                n_on_disk = 0 if self.disk is None else n_whole
                return [Stored(message.id, n_whole, n_on_disk, is_storing=self.is_storing)]
            case Outline():
                self.outlined.append(message)
                tokens = pack_tokens([67, 72]) if message.contents else b""
                nodes = (
                    TreeNode(1, -1, 0, 20, 1, 0, 5, False, n_more=3, n_more_pages=4),
                    TreeNode(2, 0, 16, 16, 1, 2, 0, True, tokens=tokens),
                    TreeNode(3, -1, 0, 6, 0, 0, None, False, n_more=1, n_more_pages=6, namespace="5eed0001"),
                )
                device = TierOutline(nodes, 30, 4, 0, 0)
                host = None if self.host is None else TierOutline((), 0, 0, 0, 0)
                return [Outlined(message.id, device, host, self.joint)]
            case Pin():
                self.pinned.append(message)
                n_tokens = len(message.tokens) // 4
                if self.refuses_pins:
                    return [Failed(message.id, "unsupported_feature", "nothing can be pinned", "ttl")]
                return [Pinned(message.id, n_tokens, n_tokens // 2, message.ttl_s)]
            case BeginPause():
                self.paused.append(message)
                return [PauseBegun(message.id)]
            case EndPause():
                self.ended_pauses.append(message.request_id)
                return [PauseEnded(message.id)]
            case GetTables():
                return [self._tables(message)]
            case GetStats():
                return [self._stats(message.id)]
        return []

    def turn(self) -> list[FromRuntime]:
        time.sleep(self.step_s)
        items: list[NewTokens] = []
        prompts: list[PromptLogprobs] = []
        computed: list[ComputedPrompt] = []
        ends: list[FromRuntime] = []
        for request_id, request in list(self.running.items()):
            if (count := request.submit.sampling.prompt_logprobs) is not None and request.n == 0:
                tokens = request.prompt[request.n_prompt_logprobs : request.n_prompt_logprobs + 40]
                prompts.append(
                    PromptLogprobs(
                        request_id, request.n_prompt_logprobs, [scripted_logprobs(token, count) for token in tokens]
                    )
                )
                request.n_prompt_logprobs += len(tokens)
                if request.n_prompt_logprobs < len(request.prompt):
                    continue
            if request.prompt[0] == KILLS and request.n == 3:
                raise RuntimeError("scripted\ndeath")
            if request.prompt[0] == FAILS_AFTER_THREE and request.n == 3:
                if self.may_fail:
                    ends.append(Failed(request_id, "numerical_error", "the model gave NaN", None))
                continue
            if self.fails_cancelled_after is not None and request.n >= self.fails_cancelled_after:
                continue
            if request.n == 0:
                n_prompt = len(request.prompt)
                n_added = n_prompt - n_prompt % 16 - n_prompt // 2 // 16 * 16
                computed.append(ComputedPrompt(request_id, CacheUse(n_prompt // 2, n_added=n_added)))
            items += self._step(request)
            if request.is_done:
                ends.append(self._done(request))
        for end in ends:
            self.running.pop(end.id, None)
        return [Tokens(items, prompts, computed), *ends]

    def _step(self, request: _Running) -> list[NewTokens]:
        """Generates the next token of each choice; choices after the first start one step later."""
        sampling = request.submit.sampling
        if (pooling := request.submit.pooling) is not None:
            request.choices[0].finish_reason = "stop"
            pooled = struct.pack("<f", 1.0) * (len(pooling.token_ids) or 4)
            return [NewTokens(request.submit.id, b"", finish_reason="stop", pooled=pooled)]
        has_begun = request.n > 0
        items = []
        for index, choice in enumerate(request.choices):
            if choice.finish_reason is not None or (index and not has_begun):
                continue
            echo = request.prompt[(choice.n + index) % len(request.prompt)]
            token = self.answers[index][choice.n] if self.answers else echo
            choice.n += 1
            ends = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
            if ends and choice.n > sampling.min_tokens:
                choice.finish_reason = "stop"
            elif choice.n == sampling.max_tokens:
                choice.finish_reason = "length"
            items.append(
                NewTokens(
                    request.submit.id,
                    pack_tokens([token]),
                    index,
                    choice.finish_reason,
                    token if choice.finish_reason == "stop" else None,
                    None if sampling.logprobs is None else [scripted_logprobs(token, sampling.logprobs)],
                )
            )
        return items

    def _cancel(self, message: Cancel) -> list[FromRuntime]:
        request = self.running.get(message.id)
        if request is None:
            return []
        if message.choice is None:
            del self.running[message.id]
            return [self._done(request)]
        choice = request.choices[message.choice]
        if choice.finish_reason is not None:
            return []
        choice.finish_reason = "abort"
        end = Tokens([NewTokens(message.id, b"", message.choice, "abort")])
        if not request.is_done:
            return [end]
        del self.running[message.id]
        if self.fails_cancelled_after is not None:
            return [end, Failed(message.id, "device_error", "the device was lost", None)]
        return [end, self._done(request)]

    def check(self) -> None:
        assert all(request.n >= 0 for request in self.running.values())

    def _done(self, request: _Running) -> Done:
        n_prompt = len(request.prompt)
        reason = request.choices[-1].finish_reason or "abort"
        n_loaded, n_fetched = int(self.host is not None), int(self.disk is not None)
        return Done(
            request.submit.id,
            reason,
            n_prompt,
            request.n,
            CacheUse(n_prompt // 2, n_loaded=n_loaded, n_fetched=n_fetched),
            0.25,
            load_interval_s=(0.05, 0.2) if n_loaded else None,
            drafts=self.draft_use,
        )

    def _tables(self, message: GetTables) -> Tabled:
        """Says that each request has two pages of the tree and one of its own."""
        self.tabled.append(message)
        pages = (
            TablePage(0, 7, 16, "tree", 2, "device"),
            TablePage(1, 3, 16, "tree", 1, "device"),
            TablePage(2, 9, 5, "own", 1, "device"),
        )
        shown = pages[message.first :] if message.requests else ()
        tables = tuple(
            RequestTables(
                one.submit.id,
                one.submit.namespace.tenant,
                tuple(
                    ChoiceTable(index, "running", len(one.prompt), 37, 37, 2, 1, 1, batch_slot=index, pages=shown)
                    for index in range(len(one.choices))
                ),
            )
            for one in self.running.values()
            if not message.requests or one.submit.id in message.requests
        )
        return Tabled(message.id, PoolUse(64, 32, 2, 1, 28, 0, 1), tables)

    def _stats(self, stats_id: str) -> Stats:
        return Stats(
            id=stats_id,
            n_running=len(self.running),
            n_waiting=7,
            n_pages=64,
            n_pages_free=32,
            n_pages_evictable=16,
            n_pages_pinned=8,
            prefix_queries_total=100,
            cache_use=CacheUse(
                40,
                n_loaded=30 if self.host else 0,
                n_fetched=20 if self.disk or self.shared_store else 0,
                n_shared=20 if self.shared_store else 0,
            ),
            prompt_tokens_total=100,
            generation_tokens_total=50,
            preemptions_total=1,
            recomputed_tokens_total=3,
            pages_evicted_total=2,
            steps_total=9,
            step_seconds=1.5,
            schedule_seconds=0.5,
            frames_dropped_total=0,
            start_seconds={"imports": 1.5, "weights": 0.5},
            host=self.host,
            disk=self.disk,
            shared_store=self.shared_store,
            drafts=self.drafts,
            states=self.states,
            pauses=self.pauses,
            windows=self.windows,
            adapters=self.adapters,
            tenants=self.tenants,
            replicas=self.replicas,
        )


@dataclass
class Site:
    """The app, its runtime client and the scripted runtime, on real sockets."""

    http: httpx.Client
    port: int
    loop: ScriptedLoop
    client: RuntimeClient
    events: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.events).result(timeout=120)


def run_as_process(loop: ScriptedLoop) -> int:
    """Runs the real process entry around a scripted loop."""
    checkpoints = types.ModuleType("radixkv.checkpoints")
    checkpoints.resolve = lambda folder, **settings: folder
    module = types.ModuleType("radixkv.runtime.open_loop")
    module.build_loop = lambda config, checkpoint, tokenizer_folder, **settings: loop
    sys.modules |= {"radixkv.checkpoints": checkpoints, "radixkv.runtime.open_loop": module}
    from radixkv.runtime.process import main

    return main()


if __name__ == "__main__":
    sys.exit(run_as_process(ScriptedLoop(float(sys.argv[1]), **dict.fromkeys(sys.argv[2:], True))))
