"""The canary over the real loop and CPU device: silent while the cache is right, loud when KV has changed."""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixkv.checkpoints import resolve
from radixkv.errors import ConfigError, QueueFull
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.canary import (
    N_ANSWER_TOKENS,
    N_PAGES,
    NAMESPACE,
    Answer,
    Canary,
    find_difference,
    known_prompt,
    tolerance,
)
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.served_model import ServedModel
from radixkv.runtime.device.cpu import executor as executor_cpu
from radixkv.runtime.device.memory.cpu.host_slots import CpuHostSlots
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.open_loop import build_loop
from radixkv.runtime.process import RuntimeServer
from radixkv.settings.config import CacheConfig, EngineConfig
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Done, GetStats, Ready, Submit, TokenLogprobs, pack_tokens
from radixkv.wire.sampling import SamplingParams
from support import threaded_runtime
from support.scripted_runtime import ScriptedLoop

PAGE_SIZE = 16
POOL = CacheConfig(max_total_tokens=40 * PAGE_SIZE)
HOST = CacheConfig(max_total_tokens=40 * PAGE_SIZE, host_memory_bytes=16 << 20, load_policy="always")
N_TOKENS = N_PAGES * PAGE_SIZE + PAGE_SIZE // 2 + 1
"""Tokens of the canary's prompt."""
COUNTERS = (
    "prefix_queries_total",
    "cache_use",
    "prompt_tokens_total",
    "generation_tokens_total",
    "pages_evicted_total",
)


@dataclass
class World:
    """A canary, and its runtime with the memory."""

    canary: Canary
    client: RuntimeClient
    metrics: Metrics
    pool: KVPool
    host: list[CpuHostSlots]
    lines: list[str]

    def counts(self, name: str) -> dict[str, int]:
        """Returns a counter of the canary by tier, without zeros."""
        (stats,) = ScriptedLoop().receive(GetStats(id="g"))
        text = self.metrics.render(stats).decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {s.labels["tier"]: int(s.value) for s in samples if s.name == f"radixkv:{name}_total" and s.value}

    async def ask(self, ids: list[int], max_tokens: int = 4) -> Done:
        prompt = Submit(uuid.uuid4().hex, pack_tokens(ids), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        done = None
        async with self.client.submit([prompt], arrived=Arrival(time.monotonic(), "/test")) as group:
            async for delta in group.deltas():
                done = delta.done or done
        assert done is not None
        return done

    async def n_on_device(self) -> int:
        """Returns how many tokens of the canary's prompt a request with its salt would find on the device."""
        (matched,) = (await self.client.match([self.canary.prompt], NAMESPACE)).prompts
        return matched.n_on_device

    async def settle(self) -> None:
        """Waits until pages that were offered to the lower tiers are there."""
        n_stored = -1
        while (stats := await self.client.stats()).host is not None:
            n_written = 0 if stats.disk is None else stats.disk.pages_written_total
            if n_stored == stats.host.pages_stored_total + n_written:
                return
            n_stored = stats.host.pages_stored_total + n_written
            await asyncio.sleep(0.1)


def served(ready: Ready, tokenizer: Tokenizer | None = None) -> ServedModel:
    return ServedModel(
        name="tiny", root="tiny", ready=ready, tokenizer=tokenizer, eos_token_ids=frozenset(), created=0
    )


Run = Callable[[CacheConfig, Callable[[World], Awaitable[None]]], None]


@pytest.fixture
def run(sensitive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a test in this thread, and the runtime in another one."""
    return lambda cache, test: run_both(sensitive, tmp_path, monkeypatch, cache, test)


def run_both(
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: CacheConfig,
    test: Callable[[World], Awaitable[None]],
) -> None:
    pools: list[KVPool] = []
    hosts: list[CpuHostSlots] = []

    class SeenPool(KVPool):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            pools.append(self)

    class SeenSlots(CpuHostSlots):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            hosts.append(self)

    monkeypatch.setattr(executor_cpu, "KVPool", SeenPool)
    monkeypatch.setattr(executor_cpu, "CpuHostSlots", SeenSlots)
    checkpoint = resolve(str(model), None)
    loop = build_loop(EngineConfig(cache=cache), checkpoint)

    metrics, lines = Metrics(), list[str]()

    async def with_world(client: RuntimeClient, server: RuntimeServer) -> None:
        served_model = served(loop.ready, Tokenizer.load(checkpoint.folder))
        canary = Canary(client, served_model, metrics, 0.001, write=lines.append)
        await test(World(canary, client, metrics, pools[0], hosts, lines))

    threaded_runtime.run(folder, loop, with_world, metrics)
    loop.close()


def other(seed: int, n_tokens: int = 70) -> list[int]:
    return [100 + (seed * 37 + i * (seed + 3)) % 900 for i in range(n_tokens)]


@pytest.mark.nightly
def test_many_rounds_are_silent_and_no_statistics_count_them(run: Run) -> None:
    async def test(world: World) -> None:
        await world.ask(other(1))
        before = await world.client.stats()
        for _ in range(8):
            await world.canary.check()
        assert world.counts("canary_checks") == {"device": 8}
        assert world.counts("canary_failures") == {}
        assert world.lines == []
        after = await world.client.stats()
        for name in COUNTERS:
            assert getattr(after, name) == getattr(before, name), name
        assert world.client.misses.n_requests == 1
        text = world.metrics.render(after).decode()
        assert "radixkv:time_to_first_token_seconds_count 1.0" in text
        assert "radixkv:e2e_request_latency_seconds_count 1.0" in text
        assert after.n_running == after.n_waiting == 0
        assert after.n_pages_free + after.n_pages_evictable == after.n_pages
        assert before.n_pages_free - after.n_pages_free <= N_PAGES + 1, "only one path stays cached"
        assert (await world.ask(other(1))).cache_use.n_cached >= 64, "another prompt was evicted"

    run(POOL, test)


@pytest.mark.nightly
def test_rounds_are_right_while_others_fill_the_pool(run: Run) -> None:
    async def test(world: World) -> None:
        async def traffic(seed: int) -> None:
            for i in range(6):
                await world.ask(other(10 * seed + i, 90 + i), max_tokens=20)

        async def rounds() -> None:
            for _ in range(10):
                await world.canary.check()

        await asyncio.gather(rounds(), *map(traffic, range(4)))
        assert world.counts("canary_failures") == {}
        assert sum(world.counts("canary_checks").values()) >= 5

    run(POOL, test)


@pytest.mark.nightly
def test_each_tier_is_checked(run: Run, tmp_path: Path) -> None:
    async def test(world: World) -> None:
        for _ in range(9):
            await world.canary.check()
            await world.settle()
        assert world.counts("canary_checks") == {"device": 3, "host": 3, "storage": 3}
        assert world.counts("canary_failures") == {}

    tiers = CacheConfig(
        max_total_tokens=40 * PAGE_SIZE,
        host_memory_bytes=16 << 20,
        cache_dir=str(tmp_path / "cache"),
        load_policy="always",
    )
    run(tiers, test)


def test_a_changed_bit_of_the_pool_is_found_and_its_path_dropped(run: Run) -> None:
    async def test(world: World) -> None:
        await world.canary.check()
        assert await world.n_on_device() == N_PAGES * PAGE_SIZE
        first = next(page for page in range(world.pool.n_pages) if world.pool.k[:, page].any())
        value = world.pool.v[-1, first].flatten()[5]
        changed = struct.unpack("<I", struct.pack("<f", value))[0] ^ (1 << 20)
        world.pool.v[-1, first].view(-1)[5] = struct.unpack("<f", struct.pack("<I", changed))[0]
        await world.canary.check()
        assert world.counts("canary_failures") == {"device": 1}
        (line,) = world.lines
        assert line.startswith(
            f"error: the canary's answer differs if {N_TOKENS - 1} tokens of its prompt come from"
        )
        assert f"dropped ({N_PAGES + 1} of tier device)" in line
        assert await world.n_on_device() == 0
        stats = await world.client.stats()
        assert stats.n_pages_free + stats.n_pages_evictable == stats.n_pages
        for _ in range(3):
            await world.canary.check()
        assert world.counts("canary_failures") == {"device": 1}, "the changed page was found again"

    run(POOL, test)


@pytest.mark.nightly
def test_what_the_host_tier_has_changed_is_found_as_it_comes_back(run: Run) -> None:
    async def test(world: World) -> None:
        await world.canary.check()
        await world.settle()
        (host,) = world.host
        for slot in range(host.n_slots):
            memory = host.buffer(slot)
            if any(memory):
                memory[0] ^= 0x40
        await world.canary.check()
        assert world.counts("canary_failures") == {"host": 1}
        assert "lowest tier: host" in world.lines[0]
        assert "of tier host" in world.lines[0]
        await world.settle()
        for _ in range(4):
            await world.canary.check()
            await world.settle()
        assert world.counts("canary_failures") == {"host": 1}
        assert world.counts("canary_checks")["host"] >= 2

    run(HOST, test)


def test_a_round_without_a_runtime_is_left_out(run: Run) -> None:
    async def test(world: World) -> None:
        world.client.refusal = QueueFull("full")
        running = asyncio.create_task(world.canary.run())
        await asyncio.sleep(0.1)
        assert world.counts("canary_checks") == {}
        world.client.refusal = None
        while not world.counts("canary_checks"):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(POOL, test)


READY = ScriptedLoop().ready


@pytest.mark.parametrize(
    ("max_model_len", "n_tokens"), [(4096, N_TOKENS), (60, 52), (PAGE_SIZE + 1 + N_ANSWER_TOKENS, PAGE_SIZE + 1)]
)
def test_the_prompt_fits_the_context(max_model_len: int, n_tokens: int) -> None:
    ready = msgspec.structs.replace(READY, max_model_len=max_model_len, page_size=PAGE_SIZE, n_pages=1000)
    assert len(known_prompt(served(ready))) == 4 * n_tokens


def test_a_context_without_room_for_a_page_is_refused() -> None:
    ready = msgspec.structs.replace(READY, max_model_len=PAGE_SIZE + N_ANSWER_TOKENS, page_size=PAGE_SIZE)
    with pytest.raises(ConfigError, match="at least 25 tokens"):
        known_prompt(served(ready))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "cpu", "dtype": "float32"}, 0.0),
        ({"device": "cpu", "dtype": "float32", "kv_cache_dtype": "fp8_e4m3"}, 0.0),
        ({"device": "cpu", "dtype": "bfloat16"}, 0.3),
        ({"device": "NVIDIA H200", "dtype": "bfloat16"}, 0.3),
        ({"device": "NVIDIA H200", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, 0.6),
    ],
)
def test_only_the_cpu_in_float32_must_be_exact(changes: dict[str, str], expected: float) -> None:
    assert tolerance(msgspec.structs.replace(READY, **changes)) == expected


def answer(*places: tuple[int, dict[int, float]]) -> Answer:
    """Returns an answer of tokens, each with the logprobs of the likeliest tokens there."""
    logprobs = [
        TokenLogprobs(top[token], 1, pack_tokens(list(top)), struct.pack(f"<{len(top)}f", *top.values()))
        for token, top in places
    ]
    return Answer([token for token, _ in places], logprobs, 64, "device")


SURE = (7, {7: -0.25, 8: -2.0})
TIE = {7: -0.75, 8: -0.875}


@pytest.mark.parametrize(
    ("cached", "cold", "is_exact", "is_close"),
    [
        (answer(SURE, SURE), answer(SURE, SURE), True, True),
        (answer(SURE, (7, {7: -0.3, 8: -2.0})), answer(SURE, SURE), False, True),
        (answer((7, {7: -0.25, 8: -2.0001})), answer(SURE), False, True),
        (answer((7, {7: -0.75, 8: -2.0})), answer(SURE), False, False),
        (answer((7, {7: float("nan"), 8: -2.0})), answer(SURE), False, False),
        (answer((8, TIE)), answer((7, TIE)), False, True),
        (answer((8, TIE), (3, {3: -0.1})), answer((7, TIE), (4, {4: -0.1})), False, True),
        (answer(SURE, (8, TIE)), answer(SURE, SURE), False, False),
        (answer((8, TIE)), answer(SURE), False, False),
        (answer((9, {9: -0.5})), answer((7, TIE)), False, False),
    ],
)
def test_tokens_may_differ_only_where_rounding_explains_it(
    cached: Answer, cold: Answer, is_exact: bool, is_close: bool
) -> None:
    assert (find_difference(cached, cold, 0.0) is None) == is_exact
    assert (find_difference(cached, cold, 0.3) is None) == is_close
    assert (find_difference(cold, cached, 0.3) is None) == is_close
