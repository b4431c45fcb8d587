"""Where prompts go, by what replicas say that they have, what was sent to them, and their load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from radixkv.errors import RequestError, RuntimeDied
from radixkv.frontend.replicas.placement import MAX_PROBED_PROMPTS, TOKENS_PER_ANSWER, UNKNOWN_S, Placement
from radixkv.frontend.served_model import ServedModel
from radixkv.wire.adapter_messages import ServedAdapter
from radixkv.wire.cache_messages import Matched, TierMatch
from radixkv.wire.messages import Submit, pack_tokens
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.request_limits import MAX_MATCHED_TOKENS
from radixkv.wire.sampling import SamplingParams
from support.scripted_runtime import ScriptedLoop

N_TOKENS = 400


@dataclass
class FakeReplica:
    """A replica that has the same number of tokens of every prompt."""

    n_on_device: int = 0
    n_in_host: int = 0
    n_on_disk: int = 0
    load: float = 0.0
    empty_since: float = 0.0
    silence_s: float = 0.0
    may_answer: asyncio.Event | None = None
    error: RequestError | None = None
    asked: list[Sequence[bytes]] = field(default_factory=list)

    async def match(self, prompts: Sequence[bytes], namespace: CacheNamespace) -> Matched:
        self.asked.append(prompts)
        await asyncio.sleep(self.silence_s)
        if self.may_answer is not None:
            await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        one = TierMatch(N_TOKENS, self.n_on_device, self.n_in_host, self.n_on_disk)
        return Matched("", (one,) * len(prompts), 0, 0, 0, 0)


def prompt(first: int = 1, *, salt: str = "", adapter: str = "", reads_cache: bool = True) -> Submit:
    tokens = pack_tokens([first, *range(2, N_TOKENS + 1)])
    return Submit("a", tokens, SamplingParams(), CacheNamespace("", salt, adapter), reads_cache=reads_cache)


def choose(placement: Placement, replicas: Mapping[int, FakeReplica], one: Submit | None = None) -> int:
    one = one or prompt()
    found = asyncio.run(placement.probe(replicas, [one]))
    return placement.choose(one, replicas, {index: lengths[0] for index, lengths in found.items()}).number


@dataclass
class Clock:
    """A clock that a test moves."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def patient(clock: Clock | None = None, model: ServedModel | None = None) -> Placement:
    """Returns a placement of two replicas that waits for those of a busy machine."""
    return Placement(None if model is None else model.beginning, probe_limit_s=30.0, clock=clock or Clock())


def test_a_prompt_goes_where_most_of_it_is() -> None:
    replicas = {0: FakeReplica(n_on_device=160), 1: FakeReplica(n_on_device=80, n_in_host=160)}
    assert choose(patient(), replicas) == 1
    replicas[1].n_in_host = 0
    assert choose(patient(), replicas) == 0


def test_a_busy_replica_gets_no_prompt_for_its_match() -> None:
    replicas = {0: FakeReplica(n_on_device=400, load=100), 1: FakeReplica()}
    assert choose(patient(), replicas) == 1


def test_what_no_replica_has_goes_to_the_one_with_the_least_load() -> None:
    replicas = {0: FakeReplica(load=1), 1: FakeReplica()}
    assert choose(patient(), replicas) == 1


def test_prompts_that_arrive_together_go_where_the_first_went() -> None:
    placement, replicas = patient(), {0: FakeReplica(), 1: FakeReplica()}
    first = choose(placement, replicas)
    assert [choose(placement, replicas) for _ in range(4)] == [first] * 4
    assert choose(placement, replicas, prompt(salt="other")) != first
    assert choose(placement, replicas, prompt(first=99, salt="another")) != first


ACTIVATED, LORA, INVOCATION = "12ab", "34cd", (300, 301)


def served_model() -> ServedModel:
    adapters = (ServedAdapter("judge", "judge", ACTIVATED, INVOCATION), ServedAdapter("sql", "sql", LORA))
    ready = replace(ScriptedLoop().ready, adapters=adapters)
    return ServedModel(name="echo", root="some/echo", ready=ready, tokenizer=None, created=0)


def test_an_activated_lora_goes_where_the_model_has_the_prompt_before_its_invocation() -> None:
    """Also right behind it, before a replica can say that it has the prompt."""
    placement, replicas = patient(model=served_model()), {0: FakeReplica(), 1: FakeReplica()}
    for salt in "abcdef":
        first = choose(placement, replicas, prompt(salt=salt))
        again = prompt(salt=salt, adapter=ACTIVATED)
        assert choose(placement, replicas, again) == first
    assert sum(placement.n_placed(number)["recent"] for number in replicas) == 6


@pytest.mark.parametrize(("adapter", "n_shared"), [("", 400), (ACTIVATED, 299), (LORA, 0), ("56ef", 0)])
def test_recent_prompts_count_as_far_as_they_have_the_same_key(adapter: str, n_shared: int) -> None:
    """An adapter of another digest, such as one that was unloaded, shares nothing."""
    placement = patient(model=served_model())
    placement.choose(prompt(), {0: FakeReplica()}, {})
    load = placement.choose(prompt(adapter=adapter), {0: FakeReplica()}, {}).load
    n_found = N_TOKENS - (load - 1) * TOKENS_PER_ANSWER
    assert n_shared * 7 // 8 - 16 <= n_found <= n_shared


def test_for_a_silent_replica_counts_what_was_sent_to_it() -> None:
    clock = Clock()
    replicas = {0: FakeReplica(silence_s=30.0), 1: FakeReplica(n_on_device=160)}
    placement = Placement(clock=clock)
    placement.choose(prompt(), {0: replicas[0]}, {})
    clock.now_s += 2 * UNKNOWN_S
    assert choose(placement, replicas) == 0


def test_what_was_sent_lately_counts_even_if_the_replica_does_not_have_it_yet() -> None:
    clock = Clock()
    placement, replicas = patient(clock), {0: FakeReplica(), 1: FakeReplica(n_on_device=160)}
    placement.choose(prompt(), {0: replicas[0]}, {})
    assert choose(placement, replicas) == 0
    clock.now_s += 2 * UNKNOWN_S
    assert choose(placement, replicas) == 1, "it was computed and evicted"


def test_what_was_sent_before_a_flush_or_a_restart_does_not_count() -> None:
    placement, replicas = patient(), {0: FakeReplica(), 1: FakeReplica()}
    first = choose(placement, replicas)
    replicas[first].empty_since = 1001.0
    replicas[first].load = 1
    assert choose(placement, replicas) != first


def test_an_error_is_an_answer_that_did_not_come() -> None:
    replicas = {0: FakeReplica(error=RuntimeDied("dead")), 1: FakeReplica(n_on_device=160)}
    assert asyncio.run(patient().probe(replicas, [prompt()])) == {1: [160]}


def test_who_cannot_be_asked_is_not() -> None:
    replicas = {0: FakeReplica(), 1: FakeReplica()}
    for prompts in ([prompt(reads_cache=False)], [prompt(), prompt(salt="other")]):
        assert asyncio.run(patient().probe(replicas, prompts)) == {}
    assert asyncio.run(patient().probe({0: replicas[0]}, [prompt()])) == {}, "one alone gets all prompts"
    assert not any(replica.asked for replica in replicas.values())


def test_replicas_are_asked_about_some_prompts_of_a_great_batch() -> None:
    replicas = {0: FakeReplica(), 1: FakeReplica()}
    found = asyncio.run(patient().probe(replicas, [prompt()] * 1000))
    assert [len(lengths) for lengths in found.values()] == [MAX_PROBED_PROMPTS] * 2


def test_a_batch_whose_prompts_are_long_is_asked_about_in_part() -> None:
    replicas = {0: FakeReplica(), 1: FakeReplica()}
    long = replace(prompt(), tokens=bytes(4 * MAX_MATCHED_TOKENS // 2))
    found = asyncio.run(patient().probe(replicas, [long] * 5))
    assert [len(lengths) for lengths in found.values()] == [2, 2]
    found = asyncio.run(patient().probe(replicas, [replace(long, tokens=long.tokens * 3)]))
    assert [len(lengths) for lengths in found.values()] == [1, 1], "the first one always"


def test_a_replica_that_has_not_answered_is_not_asked_again_before() -> None:
    async def test() -> None:
        placement, replicas = Placement(probe_limit_s=0.01), {0: FakeReplica(), 1: FakeReplica()}
        replicas[0].may_answer = asyncio.Event()
        for _ in range(5):
            await placement.probe(replicas, [prompt()])
        assert len(replicas[0].asked) == 1
        replicas[0].may_answer.set()
        await asyncio.sleep(0)
        await placement.probe(replicas, [prompt()])
        assert len(replicas[0].asked) == 2

    asyncio.run(test())


def test_tokens_on_disk_count_half() -> None:
    assert choose(patient(), {0: FakeReplica(n_on_disk=300), 1: FakeReplica(n_on_device=200)}) == 1
    assert choose(patient(), {0: FakeReplica(n_on_disk=300), 1: FakeReplica()}) == 0


def reason(placement: Placement, replicas: Mapping[int, FakeReplica], one: Submit | None = None) -> str:
    """Places a prompt, and returns what was counted for it."""
    before = {index: placement.n_placed(index) for index in replicas}
    chosen = choose(placement, replicas, one)
    grown = [
        (index, name)
        for index in replicas
        for name, count in placement.n_placed(index).items()
        if count != before[index][name]
    ]
    ((index, name),) = grown
    assert index == chosen
    return name


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (FakeReplica(n_on_device=160), FakeReplica(), "prefix"),
        (FakeReplica(n_on_device=160), FakeReplica(n_on_device=160, load=100), "prefix"),
        (FakeReplica(n_on_device=160), FakeReplica(n_on_device=320, load=100), "load"),
        (FakeReplica(n_on_device=400, load=100), FakeReplica(), "load"),
        (FakeReplica(n_on_device=80), FakeReplica(), "new"),
        (FakeReplica(), FakeReplica(error=RuntimeDied("dead")), "silent"),
        (FakeReplica(n_on_device=160), FakeReplica(error=RuntimeDied("dead")), "prefix"),
    ],
)
def test_why_a_prompt_was_sent_there_is_counted(first: FakeReplica, second: FakeReplica, expected: str) -> None:
    assert reason(patient(), {0: first, 1: second}) == expected


def test_what_was_sent_lately_and_who_is_alone_are_reasons_too() -> None:
    placement, replicas = patient(), {0: FakeReplica(), 1: FakeReplica()}
    assert reason(placement, {0: replicas[0]}) == "only"
    assert reason(placement, replicas) == "recent"
    replicas[0].n_on_device = N_TOKENS
    assert reason(placement, replicas) == "prefix"
    assert reason(placement, replicas, prompt(reads_cache=False)) == "new", "nobody was asked"


def test_a_prompt_weighs_its_answers_and_what_it_computes() -> None:
    long = replace(prompt(), tokens=pack_tokens(range(8192)), sampling=SamplingParams(n=3))
    assert patient().choose(long, {0: FakeReplica()}, {}) == (0, 3 + 8)
    assert patient().choose(long, {0: FakeReplica()}, {0: 6144}) == (0, 3 + 2)


def test_what_was_sent_for_one_adapter_does_not_count_for_another() -> None:
    placement, replicas = patient(), {0: FakeReplica(), 1: FakeReplica()}
    first = choose(placement, replicas)
    adapted = prompt(adapter="12ab")
    second = choose(placement, replicas, adapted)
    assert second != first
    assert choose(placement, replicas, adapted) == second
    assert choose(placement, replicas) == first
    assert asyncio.run(patient().probe(replicas, [prompt(), adapted])) == {}, "prompts of two namespaces"
