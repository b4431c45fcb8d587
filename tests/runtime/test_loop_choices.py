"""Several choices, prompt scores, priorities, timeouts and explanations, as they cross the wire."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from radixkv import wire
from radixkv.config import MAX_SEED, SchedulerConfig
from radixkv.runtime.cache import PageCache
from radixkv.runtime.loop import Loop
from radixkv.runtime.plan import StepPlan
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler import Scheduler
from radixkv.sampling import SamplingParams
from radixkv.tree.node import Lease, Namespace
from support.engine import PoisoningList, token_bytes
from support.fake_device import FakeDevice, FakePending, answer, chain, prompt_scores, score, unpacked

PROMPT = list(range(1, 12))
HERE = Namespace()


class OneNamespace(FakeDevice):
    def launch(self, plan: StepPlan) -> FakePending:
        self.namespaces.update({row.slot: HERE for row in plan.rows})
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

    def explain(self, prompt: Iterable[int], salt: str = "") -> wire.Explained:
        (explained,) = self.loop.receive(wire.Explain("e", token_bytes(list(prompt)), salt))
        assert isinstance(explained, wire.Explained)
        return explained


def done(heard: Heard) -> wire.Done:
    assert isinstance(heard.last, wire.Done)
    return heard.last


def failed(heard: Heard) -> wire.Failed:
    assert isinstance(heard.last, wire.Failed)
    return heard.last


def test_each_choice_ends_in_its_tokens_and_then_comes_one_end_with_the_totals() -> None:
    front = Frontend()
    front.submit("a", n=3)
    front.run()
    heard = front.heard["a"]
    assert heard.tokens == {i: answer(HERE, PROMPT, 6, seed=5 + i) for i in range(3)}
    assert heard.ends == dict.fromkeys(range(3), "length")
    assert (done(heard).n_prompt_tokens, done(heard).n_output_tokens, done(heard).n_cached_tokens) == (11, 18, 0)
    stats = front.stats()
    assert (stats.prompt_tokens_total, stats.prefix_queries_total, stats.prefix_hits_total) == (11, 11, 0)
    assert stats.generation_tokens_total == 18


def test_cached_tokens_of_several_choices_are_the_leaders_counted_once() -> None:
    front = Frontend()
    front.submit("a")
    front.run()
    front.submit("b", n=4)
    front.run()
    assert done(front.heard["b"]).n_cached_tokens == 8
    assert (front.stats().prefix_queries_total, front.stats().prefix_hits_total) == (22, 8)


def test_seeds_of_choices_wrap_at_the_largest() -> None:
    front = Frontend()
    front.submit("a", n=2, seed=MAX_SEED)
    front.run()
    assert front.heard["a"].tokens[1] == answer(HERE, PROMPT, 6, seed=0)


def test_a_cancelled_choice_ends_at_once_and_the_others_go_on() -> None:
    front = Frontend()
    front.submit("a", n=3, max_tokens=20)
    for _ in range(4):
        front.turn()
    front.cancel("a", 1)
    heard = front.heard["a"]
    assert heard.ends == {1: "abort"}
    for unknown in (1, 3, -1):
        front.cancel("a", unknown)
    front.run()
    assert heard.ends == {0: "length", 1: "abort", 2: "length"}
    assert heard.tokens[2] == answer(HERE, PROMPT, 20, seed=7)


@pytest.mark.parametrize("n_turns", [0, 1, 3])
def test_the_last_choice_that_is_cancelled_ends_the_request(n_turns: int) -> None:
    front = Frontend()
    front.submit("a", n=3, max_tokens=20)
    for _ in range(n_turns):
        front.turn()
    for choice in (0, 2, 1):
        assert front.heard["a"].last is None
        front.cancel("a", choice)
    assert done(front.heard["a"]).finish_reason == "abort"
    front.run()
    assert front.stats().n_pages_free + front.stats().n_pages_evictable == 64


@pytest.mark.parametrize("n_turns", [0, 1, 2, 3, 5])
def test_a_cancelled_request_ends_with_all_its_choices(n_turns: int) -> None:
    front = Frontend()
    front.submit("a", n=5, max_tokens=20)
    for _ in range(n_turns):
        front.turn()
    front.cancel("a")
    assert done(front.heard["a"]).finish_reason == "abort"
    front.run()
    assert front.stats().n_pages_free + front.stats().n_pages_evictable == 64


def test_a_choice_that_fails_fails_the_request_and_ends_the_others() -> None:
    front = Frontend()
    front.submit("a", n=3, max_tokens=20)
    front.submit("b", range(30, 50))
    for _ in range(3):
        front.turn()
    victim = front.loop._live["a"].choices[1]
    while front.heard["a"].last is None:
        if victim.slot >= 0:
            front.device.nan_logits_slots.add(victim.slot)
        front.turn()
    assert failed(front.heard["a"]).code == "numerical_error"
    front.run()
    assert front.heard["b"].tokens[0] == answer(HERE, list(range(30, 50)), 6, seed=5)
    assert front.stats().n_pages_free + front.stats().n_pages_evictable == 64


def test_logprobs_come_with_their_tokens() -> None:
    front = Frontend()
    front.submit("a", logprobs=2)
    front.run()
    heard = front.heard["a"]
    known = PROMPT + heard.tokens[0]
    assert heard.logprobs == [score(chain(HERE, known[: 11 + i]), known[11 + i]) for i in range(6)]


def test_an_end_is_banned_until_the_answer_has_min_tokens() -> None:
    second = answer(HERE, PROMPT, 2)[1]
    front = Frontend()
    front.submit("early", temperature=0.0, stop_token_ids=(second,))
    front.submit("late", temperature=0.0, stop_token_ids=(second,), min_tokens=4)
    front.run()
    assert front.heard["early"].ends == {0: "stop"}
    right = answer(HERE, PROMPT, 6, [second], min_tokens=4, banned=[second])
    assert front.heard["late"].tokens[0] == right
    assert len(right) > 2


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [11, 64])
def test_prompt_scores_come_once_in_order_though_the_prompt_is_cached(n: int, budget: int) -> None:
    front = Frontend(max_num_batched_tokens=budget)
    prompt = list(range(1, 31))
    front.submit("warm", prompt)
    front.run()
    front.submit("a", prompt, n=n, prompt_logprobs=1)
    front.run()
    heard = front.heard["a"]
    assert heard.scores == prompt_scores(HERE, prompt)
    assert done(heard).n_cached_tokens == 0
    front.submit("again", prompt)
    front.run()
    assert done(front.heard["again"]).n_cached_tokens == 28, "it filled the cache"


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    front = Frontend()
    front.submit("a", [3], prompt_logprobs=0)
    front.run()
    assert front.heard["a"].scores == []
    assert done(front.heard["a"]).finish_reason == "length"


def test_who_waits_too_long_for_the_first_step_fails_though_the_loop_is_busy_with_others() -> None:
    front = Frontend(max_num_seqs=1, queue_timeout_s=5.0)
    front.submit("long", max_tokens=60)
    front.turn()
    front.submit("late", range(20, 30))
    front.now = 4.9
    front.turn()
    assert front.heard["late"].last is None
    front.now = 5.1
    front.turn()
    assert failed(front.heard["late"]).code == "queue_timeout"
    assert "5.1 s" in failed(front.heard["late"]).text
    front.now = 1000.0
    front.run()
    assert done(front.heard["long"]).n_output_tokens == 60, "what has run never times out"


def test_who_is_blocked_for_want_of_pages_times_out_and_a_retracted_one_does_not() -> None:
    front = Frontend(n_pages=16, queue_timeout_s=5.0)
    front.submit("a", max_tokens=40, seed=1)
    front.submit("b", range(20, 31), max_tokens=40)
    front.turn()
    front.submit("blocked", range(40, 100), max_tokens=1)
    while not front.loop._live["b"].choices[0].returned:
        front.now += 0.01
        front.turn()
    front.now += 10.0
    front.turn()
    assert failed(front.heard["blocked"]).code == "queue_timeout"
    front.run()
    assert done(front.heard["b"]).n_output_tokens == 40


def test_all_that_wait_time_out_and_nothing_is_left_to_do() -> None:
    front = Frontend(queue_timeout_s=1.0)
    front.submit("a", n=3)
    front.submit("b")
    front.now = 2.0
    front.turn()
    assert [failed(front.heard[i]).code for i in "ab"] == ["queue_timeout"] * 2
    assert not front.loop.has_work


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"priority": -(1 << 31) - 1}, "priority"),
        ({"priority": 1 << 31}, "priority"),
        ({"salt": "x" * 129}, "cache_salt"),
        ({"salt": "é" * 65}, "cache_salt"),
        ({"stop_token_ids": (1000,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_the_least_wrong_values_are_refused_by_name(changes: dict[str, object], param: str) -> None:
    front = Frontend()
    front.submit("bad", **changes)  # type: ignore[arg-type]
    assert (failed(front.heard["bad"]).code, failed(front.heard["bad"]).param) == ("invalid_request", param)
    front.submit("canary")
    front.run()
    assert front.heard["canary"].tokens[0] == answer(HERE, PROMPT, 6, seed=5)


def test_the_last_right_values_are_taken() -> None:
    front = Frontend()
    front.submit("a", priority=-(1 << 31), stop_token_ids=(999, 0), logit_bias={999: 1.0, 0: -1.0})
    front.submit("b", priority=(1 << 31) - 1)
    front.run()
    assert all(done(heard) for heard in front.heard.values())


def test_many_choices_count_as_one_request_of_the_queue() -> None:
    front = Frontend(max_queued_requests=2, max_num_seqs=1)
    front.submit("a", n=8)
    front.submit("b", n=8)
    front.submit("c")
    assert failed(front.heard["c"]).code == "queue_full"
    front.turn()
    front.submit("d")
    front.run()
    assert [done(front.heard[i]).n_output_tokens for i in "abd"] == [48, 48, 6]


def n_objects() -> int:
    return sum(type(one) in (Request, Lease) for one in gc.get_objects())


def test_nothing_of_a_request_is_left_for_the_collector_which_is_off() -> None:
    front = Frontend(max_queued_requests=1)
    gc.collect()
    n_before = n_objects()
    gc.disable()
    try:
        front.submit("first", n=3)
        front.submit("refused", n=3)
        front.turn()
        front.cancel("first", 0)
        front.run()
        front.submit("cancelled", n=3)
        front.cancel("cancelled")
        assert failed(front.heard["refused"]).code == "queue_full"
        assert n_objects() == n_before
    finally:
        gc.enable()


def test_explain_says_how_much_is_cached_and_what_differs() -> None:
    front = Frontend()
    front.submit("a", range(1, 13))
    front.run()
    assert front.explain(range(1, 13)) == wire.Explained("e", 12, 12, "whole")
    found = front.explain([*range(1, 11), 99, 98])
    assert (found.n_cached, found.reason, found.first_difference) == (8, "differs", 10)
    assert (found.token, found.cached_token) == (99, 11)
    found = front.explain(range(1, 13), salt="hers")
    assert (found.n_cached, found.reason, found.n_cached_elsewhere) == (0, "other_namespace", 12)
    assert (found.first_difference, found.token, found.cached_token) == (None, None, None)
    front.loop._scheduler.cache.tree.evict(64)
    assert front.explain(range(1, 13)).reason == "never_seen", "its namespace is empty"


def test_explain_checks_its_tokens_and_its_salt() -> None:
    front = Frontend()
    for message, param in (
        (wire.Explain("e", b""), "prompt"),
        (wire.Explain("e", b"abc"), "prompt"),
        (wire.Explain("e", token_bytes([1000])), "prompt"),
        (wire.Explain("e", token_bytes([1]), "x" * 129), "cache_salt"),
    ):
        (answered,) = front.loop.receive(message)
        assert isinstance(answered, wire.Failed)
        assert (answered.code, answered.param) == ("invalid_request", param)


@pytest.mark.parametrize("block", range(4))
def test_random_sessions_keep_the_rules_of_the_wire(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        front = Frontend(
            n_pages=rng.choice((24, 48)), max_num_seqs=4, max_num_batched_tokens=16, queue_timeout_s=50
        )
        for number in range(rng.randrange(2, 10)):
            first = rng.randrange(1, 4)
            front.submit(
                f"r{number}",
                range(first, first + rng.randrange(1, 30)),
                n=rng.choice((1, 2, 4)),
                max_tokens=rng.randrange(1, 20),
                prompt_logprobs=rng.choice((None, None, 0)),
                frequency_penalty=rng.choice((0.0, 1.0)),
                logprobs=rng.choice((None, 1)),
                priority=rng.choice((0, 0, 1)),
            )
            for _ in range(rng.randrange(6)):
                front.now += rng.random()
                event = rng.random()
                if event < 0.05:
                    front.device.fail_steps.add(front.loop._counters.steps + 1)
                elif event < 0.12:
                    front.device.nan_logits_slots.add(rng.randrange(4))
                elif event < 0.2:
                    front.cancel(f"r{rng.randrange(number + 1)}", rng.choice((None, 0, 1)))
                if front.loop.has_work:
                    front.turn()
        front.device.fail_steps.clear()
        front.run()
        assert all(heard.last is not None for heard in front.heard.values())
        assert front.stats().n_pages_free + front.stats().n_pages_evictable == front.device.n_pages
