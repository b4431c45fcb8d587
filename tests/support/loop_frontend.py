"""A frontend without sockets: what it submits to a loop, and what each request then hears."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from radixkv import wire
from radixkv.config import SchedulerConfig
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.loop import Loop
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import StepPlan
from radixkv.sampling import SamplingParams
from radixkv.tree.node import Namespace
from support.engine import PoisoningList, token_bytes
from support.fake_device import FakeDevice, FakePending, unpacked

PROMPT = list(range(1, 12))
HERE = Namespace()


class OneNamespace(FakeDevice):
    def launch(self, plan: StepPlan) -> FakePending:
        self.namespaces.update({row.batch_slot: HERE for row in plan.rows})
        return super().launch(plan)


@dataclass
class Heard:
    """What a frontend has heard of one request; every rule of the wire is checked as it comes."""

    n: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)
    scores: list[wire.TokenLogprobs] = field(default_factory=list)
    last: wire.Done | wire.Failed | None = None

    def take(self, item: wire.NewTokens) -> None:
        assert self.last is None, "nothing comes after the terminal message"
        assert item.choice < self.n
        assert item.choice not in self.ends, "nothing comes after a choice's end"
        self.tokens.setdefault(item.choice, []).extend(unpacked(item.tokens))
        self.logprobs += item.logprobs or []
        if item.finish_reason is not None:
            self.ends[item.choice] = item.finish_reason
        assert (item.stop_token_id is not None) == (item.finish_reason == "stop")


class Frontend:
    """A loop over a fake device, and what came out of it."""

    def __init__(self, *, n_pages: int = 64, **settings: float) -> None:
        self.device = OneNamespace(n_pages, 4)
        self.now = 0.0
        cache = PageCache(n_pages, 4)
        cache._free = PoisoningList(self.device, cache._free)
        config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings})  # type: ignore[arg-type]
        scheduler = Scheduler(cache, config, clock=lambda: self.now)
        self.loop = Loop(scheduler, self.device, max_model_len=100, clock=lambda: self.now)
        self.heard: dict[str, Heard] = {}

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int] = PROMPT,
        *,
        priority: int = 0,
        salt: str = "",
        **sampling: object,
    ) -> None:
        params = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 6, **sampling})
        self.heard[request_id] = Heard(params.n)
        message = wire.Submit(request_id, token_bytes(list(prompt)), params, cache_salt=salt, priority=priority)
        self.take(self.loop.receive(message))

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        self.take(self.loop.receive(wire.Cancel(request_id, choice)))

    def turn(self) -> None:
        self.take(self.loop.turn())
        self.loop.check()

    def run(self) -> None:
        for _ in range(1000):
            if not self.loop.has_work:
                return
            self.turn()
        raise AssertionError("the loop does not come to an end")

    def take(self, messages: list[wire.FromRuntime]) -> None:
        for message in messages:
            match message:
                case wire.Tokens(items, prompts):
                    for stretch in prompts:
                        heard = self.heard[stretch.id]
                        assert stretch.start == len(heard.scores) + 1
                        assert not any(heard.tokens.values()), "before the first token"
                        heard.scores += stretch.items
                    for item in items:
                        self.heard[item.id].take(item)
                case wire.Done() | wire.Failed():
                    heard = self.heard[message.id]
                    assert heard.last is None, "one terminal message each"
                    heard.last = message
                    if isinstance(message, wire.Done) and message.finish_reason != "abort":
                        assert heard.ends.keys() == set(range(heard.n)), "each choice ends before its request"
                        assert message.n_output_tokens == sum(map(len, heard.tokens.values()))

    def stats(self) -> wire.Stats:
        (stats,) = self.loop.receive(wire.GetStats("s"))
        assert isinstance(stats, wire.Stats)
        return stats

    def explain(self, prompt: Iterable[int], salt: str = "", *, contents: bool = True) -> wire.Explained:
        (explained,) = self.loop.receive(wire.Explain("e", token_bytes(list(prompt)), salt, contents))
        assert isinstance(explained, wire.Explained)
        return explained


def done(heard: Heard) -> wire.Done:
    assert isinstance(heard.last, wire.Done)
    return heard.last


def failed(heard: Heard) -> wire.Failed:
    assert isinstance(heard.last, wire.Failed)
    return heard.last
