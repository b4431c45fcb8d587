"""Several real runtime processes with a scripted runtime behind one client: what is asked of whom, and who dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx
import pytest

from radixkv.errors import Draining, QueueFull, RadixKVError, RuntimeDied, SessionNotFound
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.errors import RequestNotFound, RuntimeRestarting
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.miss_counts import MissRecord
from radixkv.frontend.replicas.client import SILENT_S, ReplicasClient
from radixkv.frontend.replicas.placement import Placement
from radixkv.frontend.replicas.start import start_all
from radixkv.frontend.replicas.supervisor import ReplicaSupervisor
from radixkv.frontend.runtime_client import QUERY_TIMEOUT_S, RuntimeClient
from radixkv.frontend.runtime_process import RuntimeProcess
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.supervisor import Supervisor
from radixkv.wire.messages import Submit, pack_tokens
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats
from support.cases import rest_nightly
from support.live import children
from support.running_site import make_app
from support.scripted_process import ENDLESS, ENGINE, NOWHERE, answer, changed, command, run

OTHER_DEVICE = changed("import msgspec; return msgspec.structs.replace(super().ready, device='cpu')")
FEWER_PAGES = changed("import msgspec; return msgspec.structs.replace(super().ready, n_pages=63)")
DIES_AT_START = changed("import os; os._exit(7)")


@dataclass
class Replicas:
    """Replicas at work."""

    client: ReplicasClient
    each: Sequence[RuntimeClient]
    supervisor: ReplicaSupervisor
    pids: list[int]
    """Of the first processes."""
    may_start: asyncio.Event
    """Until it is set, no process is started again."""
    death: asyncio.Task[RuntimeDied]

    def kill(self, index: int) -> None:
        os.kill(self.pids[index], signal.SIGKILL)

    async def until(self, index: int, *, is_up: bool) -> None:
        while (self.each[index].refusal is None) != is_up:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def replicas(
    again: Sequence[str] | None = None, *, flags: Sequence[Sequence[str]] = ((), ()), **limits: Any
) -> AsyncIterator[Replicas]:
    """Supervises runtimes, of which each has its flags; ``again`` is the command that starts one again."""
    metrics, misses = Metrics(), MissRecord()
    each = [RuntimeClient(metrics, misses) for _ in flags]
    placement, may_start = Placement(probe_limit_s=QUERY_TIMEOUT_S), asyncio.Event()
    client = ReplicasClient(each, metrics, misses, placement)
    may_start.set()

    def starter(of_one: RuntimeClient) -> Any:
        async def start(*, first_event_number: int) -> RuntimeProcess:
            await may_start.wait()
            return await RuntimeProcess.start(ENGINE, NOWHERE, of_one, command=again or command())

        return start

    try:
        starts = [
            RuntimeProcess.start(
                ENGINE, NOWHERE, one, command=command(0.01, *flags[index]), name=f"replica {index}"
            )
            for index, one in enumerate(each)
        ]
        runtimes = await start_all(starts)
        supervisor = ReplicaSupervisor(
            [
                Supervisor(runtime, one, starter(one), restarts=True, first_delay_s=0.001, **limits)
                for runtime, one in zip(runtimes, each, strict=True)
            ]
        )
        death = asyncio.create_task(supervisor.run(60.0))
        try:
            yield Replicas(client, each, supervisor, [one.pid for one in runtimes], may_start, death)
        finally:
            death.cancel()
            await asyncio.gather(death, return_exceptions=True)
            await supervisor.stop()
    finally:
        await client.close()


def browser(client: ReplicasClient, served_model: ServedModel) -> httpx.AsyncClient:
    """Returns a client of the app in front of the replicas."""
    transport = httpx.ASGITransport(make_app(client, served_model))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def test_one_death_loses_the_requests_of_one_replica() -> None:
    async def test() -> None:
        async with replicas() as state:
            asking = [asyncio.create_task(answer(state.client, [1, 2], ENDLESS)) for _ in range(6)]
            while sum(one.n_in_flight for one in state.each) < 6:
                await asyncio.sleep(0.01)
            n_lost = state.each[0].n_in_flight
            assert 0 < n_lost < 6, "both have work"
            state.may_start.clear()
            state.kill(0)
            await state.until(0, is_up=False)
            while len(ended := [one for one in asking if one.done()]) < n_lost:
                await asyncio.sleep(0.01)
            assert len(ended) == n_lost
            for one in ended:
                assert isinstance(one.exception(), RuntimeDied)
            assert state.client.refusal is None
            for first in range(20):  # most of them would go to the one that has nothing to do
                assert await answer(state.client, [first, 4], 3) == pack_tokens([first, 4, first])
            stats = await state.client.stats()
            assert [one.is_up for one in stats.replicas.values()] == [False, True]
            assert stats.n_running == 6 - n_lost
            state.may_start.set()
            await state.until(0, is_up=True)
            assert state.client.n_restarts == 1
            assert [one.is_up for one in (await state.client.stats()).replicas.values()] == [True, True]
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await state.client.idle()

    run(test)


@pytest.mark.nightly
def test_what_must_reach_every_cache_fails_while_one_is_down() -> None:
    async def test() -> None:
        async with replicas() as state:
            of_one = (await state.each[0].flush()).n_pages_freed
            assert (await state.client.flush()).n_pages_freed == 2 * of_one
            state.may_start.clear()
            state.kill(1)
            await state.until(1, is_up=False)
            assert (await state.client.flush()).n_pages_freed == of_one, "it has no disk"
            state.each[1].has_disk = True
            with pytest.raises(RuntimeRestarting):
                await state.client.flush()
            with pytest.raises(RuntimeRestarting):
                await state.client.invalidate(b"", CacheNamespace(cache_salt="a"))
            await state.client.explain(pack_tokens([1, 2]), CacheNamespace(), contents=True)
            await state.client.match([pack_tokens([1, 2])], CacheNamespace())
            await state.client.outline(contents=True)
            state.may_start.set()

    run(test)


@pytest.mark.nightly
def test_requests_are_refused_while_all_are_down_and_the_server_ends_with_the_last() -> None:
    async def test() -> None:
        async with replicas(DIES_AT_START, max_restarts=1) as state:
            state.may_start.clear()
            state.kill(0)
            state.kill(1)
            for index in range(2):
                await state.until(index, is_up=False)
            for refused in (answer(state.client, [1, 2], 3), state.client.stats()):
                with pytest.raises(RuntimeRestarting):
                    await refused
            state.may_start.set()
            assert "code 7" in str(await state.death)
            with pytest.raises(RuntimeDied):
                await answer(state.client, [1, 2], 3)

    run(test)


def test_a_replica_that_does_not_start_again_leaves_the_others_at_work(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with replicas(DIES_AT_START, max_restarts=1) as state:
            state.kill(1)
            while not isinstance(state.each[1].refusal, RuntimeDied):
                await asyncio.sleep(0.01)
            assert not state.death.done()
            assert await answer(state.client, [1, 2], 3) == pack_tokens([1, 2, 1])
            log = ""
            while "replica 1 is lost, the other 1 serve on" not in log:
                await asyncio.sleep(0.01)
                log += capfd.readouterr().err

    run(test)


@pytest.mark.nightly
def test_the_end_kills_the_replicas_that_work_and_drains_the_others() -> None:
    """An idle replica may still write pages to disk."""

    async def test() -> None:
        async with replicas() as state:
            state.supervisor.stop_restarting()
            asking = asyncio.create_task(answer(state.each[0], [1, 2], ENDLESS))
            while not state.each[0].n_in_flight:
                await asyncio.sleep(0.01)
            state.supervisor.kill()
            with pytest.raises(RuntimeDied, match="replica 0 was ended by SIGKILL|replica 0 .*code -9"):
                await asking
            assert await answer(state.each[1], [1, 2], 3) == pack_tokens([1, 2, 1])

    run(test)


@pytest.mark.nightly
def test_a_server_that_drains_refuses_requests_and_still_shows_its_counters() -> None:
    async def test() -> None:
        async with replicas() as state:
            state.client.refusal = Draining("the end")
            with pytest.raises(Draining):
                await answer(state.client, [1, 2], 3)
            assert len((await state.client.stats()).replicas) == 2
            await state.client.idle()

    run(test)


@pytest.mark.parametrize(("is_one", "n_read"), rest_nightly(product([False, True], [6, 3]), kept=(3,)))
def test_a_server_that_drains_takes_the_rest_of_what_has_begun(is_one: bool, n_read: int) -> None:
    """It is not idle between two prompts of a request, and is when the reader leaves."""

    async def test() -> None:
        async with replicas() as state:
            client: Any = state.each[0] if is_one else state.client
            prompts = [Submit(f"p{n}", pack_tokens([1, 2]), SamplingParams(max_tokens=2)) for n in range(6)]
            n_ended = 0
            async with client.submit(prompts, arrived=Arrival(time.monotonic()), max_in_flight=1) as group:
                client.refusal = Draining("the end")
                idle = asyncio.create_task(client.idle())
                async with aclosing(group.deltas()) as deltas:
                    async for delta in deltas:
                        await asyncio.sleep(0.02)
                        n_ended += delta.done is not None
                        assert not idle.done() or n_ended >= 5, "not all are sent"
                        if n_ended == n_read:
                            break
            await idle
            with pytest.raises(Draining):
                await answer(client, [1, 2], 3)

    run(test)


@pytest.mark.nightly
def test_what_has_begun_is_refused_once_the_runtime_is_gone() -> None:
    async def test() -> None:
        async with replicas() as state:
            prompts = [Submit(f"p{n}", pack_tokens([1, 2]), SamplingParams(max_tokens=2)) for n in range(6)]
            async with state.client.submit(prompts, arrived=Arrival(0.0), max_in_flight=1) as group:
                deltas = group.deltas()
                await anext(deltas)
                state.client.fail(Draining("it shut down"))
                with pytest.raises(Draining, match="it shut down"):
                    [delta async for delta in deltas]
            await state.client.idle()

    run(test)


@pytest.mark.parametrize(
    ("second", "message"),
    rest_nightly(
        [(OTHER_DEVICE, "replica 1 has other sizes than replica 0: .*device='cpu'"), (DIES_AT_START, "code 7")],
        kept=(1,),
    ),
)
def test_a_start_that_fails_leaves_no_process(second: list[str], message: str) -> None:
    async def test() -> None:
        each = [RuntimeClient(Metrics()) for _ in range(2)]
        before = children(os.getpid())
        try:
            starts = [
                RuntimeProcess.start(ENGINE, NOWHERE, one, command=line)
                for one, line in zip(each, (command(), second), strict=True)
            ]
            with pytest.raises(RadixKVError, match=message):
                await start_all(starts)
        finally:
            for one in each:
                await one.close()
        assert children(os.getpid()) == before

    run(test)


@pytest.mark.nightly
def test_replicas_may_have_pools_of_different_sizes() -> None:
    async def test() -> None:
        each = [RuntimeClient(Metrics()) for _ in range(2)]
        starts = [
            RuntimeProcess.start(ENGINE, NOWHERE, one, command=line)
            for one, line in zip(each, (command(), FEWER_PAGES), strict=True)
        ]
        runtimes = await start_all(starts)
        assert [runtime.ready.n_pages for runtime in runtimes] == [64, 63]
        for runtime, one in zip(runtimes, each, strict=True):
            await runtime.stop()
            await one.close()

    run(test)


def test_a_replica_that_hangs_gets_no_requests_and_delays_no_queries() -> None:
    async def test() -> None:
        async with replicas() as state:
            os.kill(state.pids[0], signal.SIGSTOP)
            await asyncio.sleep(0.2)  # what it has sent before comes
            state.each[0].heard_at -= SILENT_S
            for first in range(20):
                assert await answer(state.client, [first, 4], 3) == pack_tokens([first, 4, first])
            stats = await state.client.stats()
            assert [one.is_up for one in stats.replicas.values()] == [False, True]
            assert isinstance(await asyncio.wait_for(state.client.stats(), QUERY_TIMEOUT_S / 2), Stats)
            os.kill(state.pids[0], signal.SIGCONT)

    run(test)


def test_sessions_and_pins() -> None:
    async def test() -> None:
        async with replicas() as state:
            with pytest.raises(SessionNotFound):
                await state.client.close_session("a", CacheNamespace())
            for each in state.each:
                prompt = Submit(uuid.uuid4().hex, pack_tokens([1, 2]), SamplingParams(max_tokens=1), session_id="a")
                async with each.submit([prompt], arrived=Arrival(time.monotonic())) as group:
                    async for _ in group.deltas():
                        pass
            of_one = (await state.each[0].close_session("a", CacheNamespace())).n_on_device
            both = await state.client.close_session("a", CacheNamespace())
            assert both.n_on_device == 2 * of_one
            for ttl_s in (60.0, 0.0):
                assert (await state.client.pin(pack_tokens([1] * 40), CacheNamespace(), ttl_s)).n_tokens == 40
            state.may_start.clear()
            state.kill(1)
            await state.until(1, is_up=False)
            one = await state.client.close_session("a", CacheNamespace())
            assert one.n_on_device == of_one, "who is down knows no session"
            state.may_start.set()

    run(test)


def test_prompts_that_a_full_queue_refuses_go_to_another_replica() -> None:
    async def test() -> None:
        async with replicas(flags=[["is_full"], []]) as state:
            asking = [answer(state.client, [first, 4], 3) for first in range(12)]  # together neither is too busy
            assert await asyncio.gather(*asking) == [pack_tokens([first, 4, first]) for first in range(12)]
            prompts = [Submit(f"{n}", pack_tokens([n, n + 1]), SamplingParams(max_tokens=2)) for n in range(4)]
            tokens = [b""] * 4
            async with state.client.submit(prompts, arrived=Arrival(time.monotonic())) as group:
                async for delta in group.deltas():
                    tokens[delta.prompt] += delta.tokens
            assert tokens == [prompt.tokens for prompt in prompts], "those of one HTTP request too"
            await state.client.idle()

    run(test)


@pytest.mark.parametrize(
    ("flags", "failed"),
    rest_nightly(
        [
            ([[], []], None),
            ([[], ["is_full"]], {"1": "queue_full"}),
            ([["is_full"], ["is_full"], []], {"0": "queue_full", "1": "queue_full"}),
        ],
        kept=(1,),
    ),
)
def test_the_health_check_generates_a_token_in_each_replica(
    served_model: ServedModel, flags: list[list[str]], failed: dict[str, str] | None
) -> None:
    async def test() -> None:
        async with replicas(flags=flags) as state, browser(state.client, served_model) as http:
            reply = await http.get("/health_generate")
            assert reply.status_code == (503 if failed else 200)
            assert reply.content == b"" if failed is None else reply.json() == {"replicas": failed}

    run(test)


@pytest.mark.nightly
def test_the_health_check_names_a_replica_without_an_answer(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.frontend.api.admin.HEALTH_GENERATE_TIMEOUT_S", 0.1)

    async def test() -> None:
        async with replicas(flags=[["is_held"], ["is_full"]]) as state, browser(state.client, served_model) as http:
            reply = await http.get("/health_generate")
            assert (reply.status_code, reply.json()["replicas"]["0"]) == (503, "runtime_silent")

    run(test)


@pytest.mark.nightly
def test_the_tree_tells_the_replicas_apart(served_model: ServedModel) -> None:
    async def test() -> None:
        async with replicas() as state, browser(state.client, served_model) as http:
            nodes = (await http.get("/cache/tree")).json()["tiers"]["device"]["nodes"]
            roots = [(node["replica"], node["namespace"]) for node in nodes if node["parent"] < 0]
            assert roots == [(index, salt) for index in range(2) for salt in ("", "5eed0001")]
            assert len({node["id"] for node in nodes}) == len(nodes) == 6
            runs = [node for node in nodes if node["parent"] >= 0]
            assert [nodes[run["parent"]]["replica"] for run in runs] == [0, 1]
            assert not any("replica" in run for run in runs)

    run(test)


@pytest.mark.nightly
def test_block_tables_are_asked_of_the_replicas_that_have_the_request(served_model: ServedModel) -> None:
    async def test() -> None:
        async with replicas() as state, browser(state.client, served_model) as http:
            prompts = [Submit(f"p{n}", pack_tokens([n, 2]), SamplingParams(max_tokens=ENDLESS)) for n in range(6)]
            arrived = Arrival(time.monotonic(), request_id="mine")
            async with state.client.submit(prompts, arrived=arrived):
                listed = (await http.get("/cache/tables")).json()
                assert sorted(one["id"] for one in listed["requests"]) == [prompt.id for prompt in prompts]
                assert {one["replica"] for one in listed["requests"]} == {0, 1}
                assert listed["pool"]["pages"] == 2 * 64
                for one in listed["requests"]:
                    found = (await http.get("/cache/tables", params={"request": one["id"]})).json()
                    assert [(each["id"], each["replica"]) for each in found["requests"]] == [
                        (one["id"], one["replica"])
                    ]
                    assert found["pool"]["pages"] == 64
                assert len((await http.get("/cache/tables?request=mine")).json()["requests"]) == 6
                state.may_start.clear()
                state.kill(0)
                await state.until(0, is_up=False)
                for one in listed["requests"]:
                    if one["replica"]:
                        assert (await state.client.tables(one["id"])).requests
                    else:
                        with pytest.raises(RequestNotFound):  # it has failed with its replica
                            await state.client.tables(one["id"])
            with pytest.raises(RequestNotFound):
                await state.client.tables("mine")
            state.may_start.set()

    run(test)


def test_a_pin_is_renewed_where_it_is_and_a_new_one_goes_where_the_prompt_is() -> None:
    async def test() -> None:
        async with replicas(flags=[["is_empty"], [], ["is_empty"]]) as state:

            async def pin(client: EngineClient, prompt: bytes, ttl_s: float) -> list[float]:
                """Pins a prompt; returns how long it is pinned in each replica."""
                await client.pin(prompt, CacheNamespace(), ttl_s)
                explained = [one.explain(prompt, CacheNamespace(), contents=False) for one in state.each]
                return [one.pin_seconds_left for one in await asyncio.gather(*explained)]

            assert await pin(state.client, pack_tokens([1] * 40), 60.0) == [0, 60, 0]
            assert await pin(state.each[2], pack_tokens([2] * 40), 60.0) == [0, 0, 60]
            assert await pin(state.client, pack_tokens([2] * 40), 90.0) == [0, 0, 90]

    run(test)


@pytest.mark.nightly
def test_a_prompt_is_refused_when_all_queues_are_full() -> None:
    async def test() -> None:
        async with replicas(flags=[["is_full"]] * 3) as state:
            with pytest.raises(QueueFull):
                await answer(state.client, [1, 2], 3)
            await state.client.idle()

    run(test)


@pytest.mark.nightly
def test_a_full_queue_refuses_at_once_what_others_may_not_take() -> None:
    """What is sent to one replica alone, as by the canary, and what is sent before a drain."""

    async def test() -> None:
        async with replicas(flags=[["is_full"], ["is_full"]]) as state:
            with pytest.raises(QueueFull):
                await answer(state.each[0], [1, 2], 3)
            prompt = Submit("a", pack_tokens([1, 2]), SamplingParams(max_tokens=2))
            async with state.client.submit([prompt], arrived=Arrival(time.monotonic())) as group:
                state.client.refusal = Draining("the end")
                with pytest.raises(QueueFull):
                    async for _ in group.deltas():
                        pass

    run(test)


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [[["is_full"], []], [[], ["is_full"]]])
def test_a_server_that_drains_answers_what_a_full_queue_has_refused(flags: list[list[str]]) -> None:
    """It was accepted before. The server is not idle once it has gone to a replica that was."""

    async def test() -> None:
        async with replicas(flags=flags) as state:
            for first in range(6):
                prompt = Submit(f"a{first}", pack_tokens([first, 4]), SamplingParams(max_tokens=4))
                tokens = b""
                async with state.client.submit([prompt], arrived=Arrival(time.monotonic())) as group:
                    state.client.refusal = Draining("the end")
                    idle = asyncio.create_task(state.client.idle())
                    async for delta in group.deltas():
                        assert not idle.done() or delta.done is not None
                        tokens += delta.tokens
                await idle
                assert tokens == pack_tokens([first, 4, first, 4])
                state.client.refusal = None

    run(test)


@pytest.mark.nightly
def test_what_a_full_queue_refuses_goes_to_the_next_best_and_is_counted_there() -> None:
    async def test() -> None:
        async with replicas(flags=[["is_full"], ["is_empty"], []]) as state:
            for first in range(4):
                assert await answer(state.client, [first, 4] * 40, 3) == pack_tokens([first, 4, first])
            placed = [one.placements_total for one in (await state.client.stats()).replicas.values()]
            n_refused = sum(placed[0].values())
            assert n_refused > 0
            assert [sum(counts.values()) for counts in placed[1:]] == [0, 4]
            assert placed[2]["queue_full"] == n_refused

    run(test)


def test_what_is_stored_of_a_prompt_is_asked_of_the_replica_that_has_computed_it() -> None:
    """Others do not answer here, and would know nothing of its copies."""

    async def test() -> None:
        async with replicas(flags=[["is_storing"], [], ["is_storing"]]) as state:
            for index, other in enumerate(state.each):
                other.refusal = None if index == 1 else Draining("the end")
            prompt = Submit("a", pack_tokens([1] * 40), SamplingParams(max_tokens=1))
            async with state.client.submit([prompt], arrived=Arrival(time.monotonic())) as group:
                async for _ in group.deltas():
                    pass
                os.kill(state.pids[0], signal.SIGSTOP)
                stored = await group.stored(0)
                os.kill(state.pids[0], signal.SIGCONT)
            assert (stored.n_in_host, stored.is_storing) == (32, False)

    run(test)


async def pausing_turn(client: ReplicasClient, name: str, resumes: str = "", max_tokens: int = 2) -> None:
    prompt = Submit(
        name, pack_tokens([1, 2]), SamplingParams(max_tokens=max_tokens), may_pause=True, resumes=resumes
    )
    async with client.submit([prompt], arrived=Arrival(time.monotonic())) as group:
        async for delta in group.deltas():
            if delta.finish_reason is not None:
                group.end_choice(delta, delta.finish_reason)
                group.begin_pause(delta, ())


@pytest.mark.nightly
def test_a_chat_that_goes_on_in_another_replica_ends_its_pause_in_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        ended: list[tuple[RuntimeClient, str]] = []
        async with replicas() as state:
            end_pause = RuntimeClient.end_pause

            def note(of: RuntimeClient, name: str) -> None:
                ended.append((of, name))
                end_pause(of, name)

            monkeypatch.setattr(RuntimeClient, "end_pause", note)
            first, second = state.each
            away = Draining("the end")
            second.refusal = away
            await pausing_turn(state.client, "a")
            await pausing_turn(state.client, "b", resumes="a")
            assert not ended, "the runtime sees for itself that it goes on"
            first.refusal, second.refusal = away, None
            await pausing_turn(state.client, "c", resumes="unknown")
            assert not ended
            await pausing_turn(state.client, "d", resumes="b")
            assert ended == [(first, "b")]
            first.refusal = None
            assert (await state.client.stats()).n_running == 0  # both have understood all messages

    run(test)


@pytest.mark.nightly
def test_a_turn_that_is_cancelled_at_once_ends_no_pause_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        ended: list[str] = []
        monkeypatch.setattr(RuntimeClient, "end_pause", lambda of, name: ended.append(name))
        async with replicas() as state:
            first, second = state.each
            second.refusal = Draining("the end")
            await pausing_turn(state.client, "a")
            first.refusal, second.refusal = second.refusal, None
            prompt = Submit("b", pack_tokens([1, 2]), SamplingParams(max_tokens=2), resumes="a")
            async with state.client.submit([prompt], arrived=Arrival(time.monotonic())):
                pass
            assert not ended
            await pausing_turn(state.client, "c", resumes="a")
            assert ended == ["a"]

    run(test)
