"""A frontend without sockets: it submits requests to a loop and collects the messages of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.runtime.adapters.loading import LoadableAdapters
from radixkv.runtime.assemble import assemble_loop, page_quotas
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.pauses.pauses import Pauses
from radixkv.runtime.step.plan import StepPlan
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import Namespace
from radixkv.wire import cache_messages
from radixkv.wire import messages as wire
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats
from support.engine import PoisoningList, token_bytes
from support.fake_device import FakeDevice, FakeStep, unpack
from support.fake_grammars import FakeCompiler
from support.scheduler import make_scheduler

PROMPT = list(range(1, 12))
NAMESPACE = Namespace()


class OneNamespaceDevice(FakeDevice):
    def launch(self, plan: StepPlan) -> FakeStep:
        self.namespaces.update({row.batch_slot: NAMESPACE for row in plan.rows})
        return super().launch(plan)


@dataclass
class ReceivedMessages:
    """The messages that a frontend has received for one request; checks the rules of the wire on arrival."""

    n: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    stop_token_ids: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    pooled: bytes | None = None
    terminal: wire.Done | wire.Failed | None = None

    def take(self, item: wire.NewTokens) -> None:
        assert self.terminal is None, "nothing comes after the terminal message"
        assert item.choice < self.n
        assert item.choice not in self.finish_reasons, "nothing comes after a choice's end"
        self.tokens.setdefault(item.choice, []).extend(unpack(item.tokens))
        self.logprobs += item.logprobs or []
        if item.finish_reason is not None:
            self.finish_reasons[item.choice] = item.finish_reason
        if item.pooled is not None:
            assert (item.tokens, item.finish_reason) == (b"", "stop"), "what is pooled comes alone, with the end"
            self.pooled = item.pooled
        assert (item.stop_token_id is not None) == (item.finish_reason == "stop" and item.pooled is None)
        if item.stop_token_id is not None:
            self.stop_token_ids[item.choice] = item.stop_token_id


class Frontend:
    """Drives a loop with a fake device, and collects its messages by request."""

    def __init__(
        self,
        *,
        n_pages: int = 64,
        eos_token_ids: frozenset[int] = frozenset(),
        open_grammars: Callable[[], FakeCompiler] | None = None,
        tenants: Sequence[TenantConfig] = (),
        adapters: LoadableAdapters | None = None,
        **settings: Any,
    ) -> None:
        self.device = OneNamespaceDevice(n_pages, 4)
        cache = PageCache(
            n_pages,
            4,
            min_copied_tokens=1,
            free_pages=PoisoningList(self.device),
            page_quotas=page_quotas(tenants),
            clock=lambda: self.now,
        )
        if adapters is not None:
            cache.tree.marks = adapters.marks
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
        pauses = Pauses(cache, lambda: self.now)
        self.scheduler = make_scheduler(
            cache,
            **(defaults | settings),
            tenants=tenants,
            returns=pauses,
            adapter_slots=None if adapters is None else adapters._slots,
            clock=lambda: self.now,
        )
        self.grammars = FakeCompiler()
        self.loop = assemble_loop(
            self.scheduler,
            self.device,
            tenants=tenants,
            pauses=pauses,
            open_grammars=open_grammars or (lambda: self.grammars),
            eos_token_ids=eos_token_ids,
            max_model_len=100,
            adapters=adapters,
            clock=lambda: self.now,
        )
        self.received: dict[str, ReceivedMessages] = {}

    @property
    def now(self) -> float:
        """The clock of loop and device, in seconds."""
        return self.device.now

    @now.setter
    def now(self, seconds: float) -> None:
        self.device.now = seconds

    def flush(self) -> None:
        (reply,) = self.loop.receive(cache_messages.Flush("flush"))
        assert isinstance(reply, cache_messages.Flushed)
        self.loop.check()

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int] = PROMPT,
        *,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        pins: Iterable[wire.PromptPin] = (),
        session_id: str = "",
        reads_cache: bool = True,
        pooling: wire.Pooling | None = None,
        may_pause: bool = False,
        resumes: str = "",
        expected_pause_s: float | None = None,
        adapter: str = "",
        **sampling: object,
    ) -> None:
        defaults = {"temperature": 1.0, "seed": 5, "max_tokens": 6} if pooling is None else {}
        params = SamplingParams(**{**defaults, **sampling})
        self.received[request_id] = ReceivedMessages(params.n)
        message = wire.Submit(
            request_id,
            token_bytes(list(prompt)),
            params,
            CacheNamespace(tenant, salt, adapter),
            priority=priority,
            pins=tuple(pins),
            session_id=session_id,
            reads_cache=reads_cache,
            pooling=pooling,
            may_pause=may_pause,
            resumes=resumes,
            expected_pause_s=expected_pause_s,
        )
        self.take(self.loop.receive(message))

    def serve(self, request_id: str, prompt: Iterable[int] = PROMPT, **options: Any) -> ReceivedMessages:
        """Submits a request and runs until the loop has no work; returns its messages."""
        self.submit(request_id, prompt, **options)
        self.run()
        return self.received[request_id]

    def close_session(self, session_id: str) -> None:
        (reply,) = self.loop.receive(cache_messages.CloseSession("close", session_id))
        assert isinstance(reply, cache_messages.SessionClosed)

    def begin_pause(self, request_id: str, *tools: str) -> None:
        (reply,) = self.loop.receive(cache_messages.BeginPause("pause", request_id, tools))
        assert isinstance(reply, cache_messages.PauseBegun)

    def end_pause(self, request_id: str) -> None:
        (reply,) = self.loop.receive(cache_messages.EndPause("end", request_id))
        assert isinstance(reply, cache_messages.PauseEnded)

    def pin(self, prompt: Iterable[int], ttl_s: float, salt: str = "") -> cache_messages.Pinned | wire.Failed:
        (reply,) = self.loop.receive(
            cache_messages.Pin("pin", token_bytes(list(prompt)), ttl_s, CacheNamespace(cache_salt=salt))
        )
        assert isinstance(reply, cache_messages.Pinned | wire.Failed)
        self.loop.check()
        return reply

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        self.take(self.loop.receive(wire.Cancel(request_id, choice)))

    def turn(self, n_turns: int = 1) -> None:
        for _ in range(n_turns):
            self.take(self.loop.turn())
            self.loop.check()

    def run(self) -> None:
        for _ in range(1000):
            if not self.loop.has_work:
                return
            if self.loop.is_waiting:
                self.grammars.finish(0)
            self.turn()
        raise AssertionError("the loop does not come to an end")

    def take(self, messages: list[wire.FromRuntime]) -> None:
        for message in messages:
            match message:
                case wire.Tokens(items, prompt_logprobs):
                    for item_range in prompt_logprobs:
                        received = self.received[item_range.id]
                        assert item_range.start == len(received.prompt_logprobs) + 1
                        assert not any(received.tokens.values()), "before the first token"
                        received.prompt_logprobs += item_range.items
                    for item in items:
                        self.received[item.id].take(item)
                case wire.Done() | wire.Failed():
                    received = self.received[message.id]
                    assert received.terminal is None, "a request gets one terminal message"
                    received.terminal = message
                    if isinstance(message, wire.Done) and message.finish_reason != "abort":
                        assert received.finish_reasons.keys() == set(range(received.n)), (
                            "each choice ends before its request"
                        )
                        assert message.n_output_tokens == sum(map(len, received.tokens.values()))

    def stats(self) -> Stats:
        (stats,) = self.loop.receive(wire.GetStats("s"))
        assert isinstance(stats, Stats)
        return stats

    def explain(
        self, prompt: Iterable[int], salt: str = "", *, contents: bool = True, adapter: str = ""
    ) -> cache_messages.Explained:
        namespace = CacheNamespace(cache_salt=salt, adapter=adapter)
        message = cache_messages.Explain("e", token_bytes(list(prompt)), namespace, contents)
        (explained,) = self.loop.receive(message)
        assert isinstance(explained, cache_messages.Explained)
        return explained

    def match(
        self, *prompts: Iterable[int], salt: str = "", tenant: str = ""
    ) -> cache_messages.Matched | wire.Failed:
        (reply,) = self.loop.receive(
            cache_messages.Match(
                "m", tuple(token_bytes(list(one)) for one in prompts), CacheNamespace(tenant, salt)
            )
        )
        assert isinstance(reply, cache_messages.Matched | wire.Failed)
        self.loop.check()
        return reply


def done(received: ReceivedMessages) -> wire.Done:
    assert isinstance(received.terminal, wire.Done)
    return received.terminal


def failed(received: ReceivedMessages) -> wire.Failed:
    assert isinstance(received.terminal, wire.Failed)
    return received.terminal
