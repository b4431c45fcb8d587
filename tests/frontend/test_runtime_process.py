from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from radixkv.errors import CheckpointError, ConfigError, RadixKVError, RuntimeDied, WireError
from radixkv.frontend import runtime_process as runtime_process_module
from radixkv.frontend.runtime_process import RuntimeProcess, preflight
from radixkv.wire.messages import pack_tokens
from support.cases import rest_nightly
from support.live import children
from support.scripted_process import ENDLESS, ENGINE, NOWHERE, answer, changed, command, connecting, run, started
from support.scripted_runtime import KILLS


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_runtime_starts_answers_and_leaves_nothing(temporary: Path) -> None:
    async def test() -> None:
        async with started(command()) as (runtime, client):
            assert await answer(client, [1, 2], 3) == pack_tokens([1, 2, 1])
            pid, (folder,) = runtime.pid, temporary.iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700
        assert not is_alive(pid)
        assert list(temporary.iterdir()) == []

    before = set(os.listdir("/proc/self/fd"))
    run(test)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("ids", "reason"), [([1, 2], "code -9"), ([KILLS], "RuntimeError: scripted death")])
def test_the_end_of_a_runtime_is_noticed_with_its_reason(ids: list[int], reason: str) -> None:
    async def test() -> None:
        async with started(command()) as (runtime, client):
            watching = asyncio.create_task(runtime.watch(60))
            asking = asyncio.create_task(answer(client, ids, 400))
            await asyncio.sleep(0.2)
            if ids != [KILLS]:
                os.kill(runtime.pid, signal.SIGKILL)
            assert reason in await watching
            client.fail(RuntimeDied("gone"))
            with pytest.raises(RuntimeDied):
                await asking

    run(test)


def test_a_silent_runtime_is_killed_at_the_heartbeat_limit() -> None:
    async def test() -> None:
        async with started(command()) as (runtime, _):
            watching = asyncio.create_task(runtime.watch(4.0))
            await asyncio.sleep(5.0)
            assert not watching.done()
            stopped_at = time.monotonic()
            os.kill(runtime.pid, signal.SIGSTOP)
            assert "silent for 4 s" in await watching
            assert time.monotonic() - stopped_at > 1.0
            pid = runtime.pid
        assert not is_alive(pid)

    run(test)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    rest_nightly(
        [
            (
                "raise errors.CheckpointError('config.json is\\n corrupt')",
                CheckpointError,
                "config.json is corrupt",
            ),
            ("raise errors.ConfigError('pool too small')", ConfigError, "pool too small"),
            ("raise MemoryError('no memory')", RadixKVError, "MemoryError: no memory"),
            ("import os; os._exit(7)", RadixKVError, "ended with code 7 before it was ready"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", RadixKVError, "not write over weights"),
            (
                "import msgspec; return msgspec.structs.replace(super().ready, version=99)",
                WireError,
                "wire version 99",
            ),
        ],
        kept=(0, 3, 4, 5),
    ),
)
def test_a_failed_start_reports_the_reason(body: str, kind: type[RadixKVError], text: str, temporary: Path) -> None:
    async def test() -> None:
        with pytest.raises(RadixKVError, match=text) as caught:
            async with connecting() as client:
                await RuntimeProcess.start(ENGINE, NOWHERE, client, command=changed(body))
        assert type(caught.value) is kind

    run(test)
    assert list(temporary.iterdir()) == []


def test_a_hanging_start_times_out(temporary: Path) -> None:
    hanging = changed("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    before = children(os.getpid())

    async def test() -> None:
        with pytest.raises(RadixKVError, match="not ready within 3 s"):
            async with connecting() as client:
                await RuntimeProcess.start(ENGINE, NOWHERE, client, command=hanging, timeout_s=3.0)

    run(test)
    assert children(os.getpid()) == before
    assert list(temporary.iterdir()) == []


def test_the_preflight_reports_its_result() -> None:
    async def test() -> None:
        await preflight(ENGINE, NOWHERE, command=[sys.executable, "-c", "input()"])
        says = """input(); print('{"kind": "ConfigError", "text": "no GPU"}'); raise SystemExit(1)"""
        with pytest.raises(ConfigError, match=r"^no GPU$"):
            await preflight(ENGINE, NOWHERE, command=[sys.executable, "-c", says])
        with pytest.raises(RadixKVError, match="ended with code -9"):
            await preflight(ENGINE, NOWHERE, command=["sh", "-c", "kill -9 $$"])

    run(test)


def test_ctrl_c_of_a_terminal_reaches_neither_process() -> None:
    async def test() -> None:
        async with started(command()) as (runtime, _):
            assert os.getpgid(runtime.pid) != os.getpgid(0)
        says = """import os; print('{"kind": "ConfigError", "text": "%d"}' % os.getpgid(0))"""
        with pytest.raises(ConfigError) as caught:
            await preflight(ENGINE, NOWHERE, command=[sys.executable, "-c", says])
        assert int(str(caught.value)) != os.getpgid(0)

    run(test)


def test_a_hanging_preflight_times_out() -> None:
    before = children(os.getpid())

    async def test() -> None:
        with pytest.raises(RadixKVError, match="took longer than 0.5 s"):
            await preflight(ENGINE, NOWHERE, command=["sleep", "3600"], timeout_s=0.5)

    run(test)
    assert children(os.getpid()) == before


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def test_folders_of_killed_servers_are_removed_at_the_next_start(temporary: Path) -> None:
    def left(name: str, *, has_socket: bool = True, has_lock: bool = True) -> Path:
        folder = temporary / name
        folder.mkdir(mode=0o700)
        if has_socket:
            make_socket(folder / "runtime.sock")
        if has_lock:
            (folder / "runtime.lock").touch()
        return folder

    stale = left("radixkv-stale")
    left("radixkv-starting", has_socket=False)
    (left("radixkv-regular", has_socket=False) / "runtime.sock").write_text("a regular file")
    (left("radixkv-linked", has_socket=False) / "runtime.sock").symlink_to(left("other") / "runtime.sock")
    (left("radixkv-linked-lock", has_lock=False) / "runtime.lock").symlink_to(temporary / "other" / "runtime.lock")
    (left("radixkv-notes") / "notes").write_text("another file")
    make_socket(left("radixkv-sockets") / "another.sock")
    (temporary / "radixkv-link").symlink_to(temporary / "other")
    make_socket(temporary / "radixkv-socket")
    kept = set(temporary.rglob("*")) - {stale, *stale.iterdir()}

    async def test() -> None:
        async with started(command()):
            mine = set(temporary.iterdir())
            async with started(command()):
                assert mine < set(temporary.iterdir())
                assert kept < set(temporary.rglob("*"))
                assert not stale.exists()

    run(test)
    assert set(temporary.rglob("*")) == kept


def test_a_folder_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = temporary / "radixkv-foreign"
    foreign.mkdir(mode=0o700)
    make_socket(foreign / "runtime.sock")
    (foreign / "runtime.lock").touch()
    mine = os.getuid()

    async def test() -> None:
        with pytest.raises(RadixKVError):
            async with connecting() as client:
                await RuntimeProcess.start(ENGINE, NOWHERE, client, command=["false"])

    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: mine + 1)
        run(test)
    assert len(list(foreign.iterdir())) == 2
    run(test)
    assert not foreign.exists()


def test_a_kill_does_not_wait_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_process_module, "STOP_TIMEOUT_S", 3600.0)

    async def test() -> None:
        async with started(command(step_s=3600.0)) as (runtime, client):
            asking = asyncio.create_task(answer(client, [1, 2], ENDLESS))
            await asyncio.sleep(0.2)
            client.fail(RuntimeDied("hurry"))
            runtime.kill()
            await asyncio.gather(asking, return_exceptions=True)

    run(test)


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))

    async def test() -> None:
        with pytest.raises(ConfigError, match="set TMPDIR to a shorter folder"):
            async with connecting() as client:
                await RuntimeProcess.start(ENGINE, NOWHERE, client, command=command())

    run(test)


def test_stop_does_not_wait_for_running_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_process_module, "STOP_TIMEOUT_S", 3600.0)

    async def test() -> None:
        async with started(command(step_s=3600.0)) as (_, client):
            asking = asyncio.create_task(answer(client, [1, 2], ENDLESS))
            await asyncio.sleep(0.2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    run(test)
