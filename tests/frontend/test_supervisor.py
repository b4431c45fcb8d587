"""The supervisor over real processes with a scripted runtime: what fails, what is refused, when it gives up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from radixkv.errors import Draining, RequestError, RuntimeDied
from radixkv.frontend.http.error_response import retry_after
from radixkv.frontend.http.errors import RuntimeRestarting
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.runtime_process import RuntimeProcess
from radixkv.frontend.supervisor import Supervisor
from radixkv.wire.messages import pack_tokens
from support.cases import rest_nightly
from support.scripted_process import ENDLESS, ENGINE, NOWHERE, answer, changed, command, connecting, run

DIES_AT_START = changed("import os; os._exit(7)")
OTHER_SIZES = changed("import msgspec; return msgspec.structs.replace(super().ready, n_pages=63)")


@dataclass
class Supervised:
    """A supervisor at work."""

    client: RuntimeClient
    supervisor: Supervisor
    pids: list[int]
    """Of the processes that were ready, in order."""
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    """Until it is set, no process is started again."""
    death: asyncio.Task[RuntimeDied] | None = None
    event_numbers: list[int] = field(default_factory=list)
    """First numbers of cache events of processes that were started again; the scripted runtime publishes none."""

    def kill(self) -> None:
        os.kill(self.pids[-1], signal.SIGKILL)

    async def accepts(self, n_restarts: int) -> None:
        """Waits until requests are accepted after so many restarts."""
        while self.client.n_restarts < n_restarts:
            await asyncio.sleep(0.01)
        assert self.client.refusal is None


@asynccontextmanager
async def supervised(*starts: Sequence[str], restarts: bool = True, **limits: Any) -> AsyncIterator[Supervised]:
    """Supervises a runtime; ``starts`` are the commands that start it again, the last one also later."""
    async with connecting() as client:
        first = await RuntimeProcess.start(ENGINE, NOWHERE, client, command=command())
        commands = list(starts or [command()])

        async def start(*, first_event_number: int) -> RuntimeProcess:
            state.event_numbers.append(first_event_number)
            await state.may_start.wait()
            line = commands.pop(0) if len(commands) > 1 else commands[0]
            process = await RuntimeProcess.start(ENGINE, NOWHERE, client, command=line)
            state.pids.append(process.pid)
            return process

        supervisor = Supervisor(first, client, start, restarts=restarts, first_delay_s=0.001, **limits)
        state = Supervised(client, supervisor, [first.pid])
        state.may_start.set()
        state.death = asyncio.create_task(supervisor.run(60.0))
        try:
            yield state
        finally:
            state.death.cancel()
            await asyncio.gather(state.death, return_exceptions=True)
            await supervisor.stop()


def test_without_restarts_everything_fails_for_good() -> None:
    async def test() -> None:
        async with supervised(restarts=False) as state:
            asking = asyncio.create_task(answer(state.client, [1, 2], ENDLESS))
            await asyncio.sleep(0.2)
            state.kill()
            with pytest.raises(RuntimeDied, match=r"code -9; start the server again"):
                await asking
            assert "code -9" in str(await state.death)
            with pytest.raises(RuntimeDied):
                await answer(state.client, [1, 2], 3)
            with pytest.raises(RuntimeDied):
                await state.client.stats()
            assert state.client.n_restarts == 0

    run(test)


def test_a_killed_runtime_is_started_again_without_its_requests() -> None:
    async def test() -> None:
        async with supervised() as state:
            for n_kills in (1, 2):
                state.may_start.clear()
                asking = [asyncio.create_task(answer(state.client, [1, 2], ENDLESS)) for _ in range(3)]
                await asyncio.sleep(0.2)
                state.kill()
                for error in await asyncio.gather(*asking, return_exceptions=True):
                    assert isinstance(error, RuntimeDied)
                    assert "code -9" in str(error)
                    assert "send the request again" in str(error)
                for refused in (answer(state.client, [1, 2], 3), state.client.stats()):
                    with pytest.raises(RuntimeRestarting):
                        await refused
                assert state.client.n_in_flight == 0
                state.may_start.set()
                await state.accepts(n_kills)
                assert await answer(state.client, [1, 2], 3) == pack_tokens([1, 2, 1])
                assert (await state.client.stats()).n_running == 0, "a request was sent again"

    run(test)


@pytest.mark.nightly
def test_a_runtime_that_dies_at_its_start_ends_it_after_the_limit() -> None:
    async def test() -> None:
        async with supervised(DIES_AT_START, max_restarts=3) as state:
            state.kill()
            error = str(await state.death)
            assert "code 7 before it was ready" in error
            assert "after 3 restarts" in error
            with pytest.raises(RuntimeDied, match="code 7"):
                await answer(state.client, [1, 2], 3)

    run(test)


@pytest.mark.nightly
def test_a_start_that_fails_is_tried_again() -> None:
    """So is one of a runtime with other sizes: requests are checked against those of the first one."""

    async def test() -> None:
        async with supervised(DIES_AT_START, ["/no/such/program"], OTHER_SIZES, command()) as state:
            state.kill()
            await state.accepts(1)
            assert await answer(state.client, [1, 2], 3) == pack_tokens([1, 2, 1])
            # A start that failed may have published that the cache is empty, and no number comes twice.
            assert state.event_numbers == [0, 1, 2, 2]
            _, other, _ = state.pids
            with pytest.raises(ProcessLookupError):
                os.kill(other, 0)

    run(test)


@pytest.mark.nightly
@pytest.mark.parametrize("has_settled", [False, True])
def test_restarts_count_until_a_runtime_has_served_for_long(has_settled: bool) -> None:
    async def test() -> None:
        async with supervised(max_restarts=1, settled_s=0.0 if has_settled else 3600.0) as state:
            state.kill()
            await state.accepts(1)
            state.kill()
            if has_settled:
                await state.accepts(2)
            else:
                assert "code -9, after 1 restarts" in str(await state.death)

    run(test)


@pytest.mark.parametrize("fails_requests", rest_nightly([False, True], kept=(1,)))
def test_a_shutdown_during_a_restart_stays_one(fails_requests: bool) -> None:
    async def test() -> None:
        async with supervised() as state:
            state.may_start.clear()
            state.kill()
            while not isinstance(state.client.refusal, RuntimeRestarting):
                await asyncio.sleep(0.01)
            state.supervisor.stop_restarting()
            state.client.refusal = Draining("the server is shutting down")
            if fails_requests:
                state.client.fail(state.client.refusal)
            state.may_start.set()
            while state.client.n_restarts == 0:
                await asyncio.sleep(0.01)
            with pytest.raises(Draining):
                await answer(state.client, [1, 2], 3)
            state.kill()
            assert "code -9; start the server" in str(await state.death)

    run(test)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeDied("gone"), "1"),
        (RuntimeRestarting("soon", ready_at=time.monotonic() - 5), "1"),
        (RuntimeRestarting("soon", ready_at=time.monotonic() + 1e4), "60"),
    ],
)
def test_retry_after_is_the_time_that_a_start_takes(error: RequestError, expected: str) -> None:
    assert retry_after(error) == {"Retry-After": expected}
    soon = retry_after(RuntimeRestarting("soon", ready_at=time.monotonic() + 20.5))
    assert 10 < int(soon["Retry-After"]) <= 21
