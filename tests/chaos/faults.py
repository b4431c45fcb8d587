"""Faults of processes, files, the device, clients and the clock, one function each."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random

from chaos.clock import set_clock
from chaos.endings import CUT, FAILED_RESPONSE
from chaos.world import HEARTBEAT_TIMEOUT_S, ChaosFailed, World, post
from support.breaking_runtime import DIES, LOST, NO_MEMORY, NO_MEMORY_ONCE, NOT_FINITE_ONCE
from support.live import LIMIT_S, is_running, open_files, wait_for

ENTRY = [sys.executable, "-m", "chaos.server_cli"]
DAY_S = 86_400
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ORPHAN_LIMIT_S = 5.0
"""How long a runtime may outlive its frontend."""


@dataclass(frozen=True)
class Fault:
    """What happens to the server under load, and how requests may then end besides with their answers."""

    name: str
    strike: Callable[[World, Random], None]
    endings: frozenset[str] = frozenset()


RESTART = frozenset({"runtime_died", "runtime_restarting", FAILED_RESPONSE})
DRAIN = frozenset({"draining", CUT, FAILED_RESPONSE})


def kill_runtime(world: World, rng: Random) -> None:
    os.kill(world.live.runtime_pid, signal.SIGKILL)
    world.wait_for_next_runtime()


def hang_runtime(world: World, rng: Random) -> None:
    """Stops the runtime for good: it is killed after the heartbeat's timeout."""
    os.kill(world.live.runtime_pid, signal.SIGSTOP)
    world.wait_for_next_runtime()


def pause_runtime(world: World, rng: Random) -> None:
    with stopped(world.live.runtime_pid):
        time.sleep(rng.uniform(0.2, HEARTBEAT_TIMEOUT_S / 2))


def pause_frontend(world: World, rng: Random) -> None:
    """Stops the frontend for longer than the runtime may be silent, which is not the runtime's fault."""
    with stopped(world.live.process.pid):
        time.sleep(rng.uniform(0.2, HEARTBEAT_TIMEOUT_S * 1.5))


def kill_frontend(world: World, rng: Random) -> None:
    runtime = world.live.runtime_pid
    world.live.process.kill()
    wait_for(lambda: not is_running(runtime), "the runtime has outlived the frontend", ORPHAN_LIMIT_S)


def terminate(world: World, rng: Random) -> None:
    """Ends the server in order, with 0."""
    world.live.process.send_signal(signal.SIGTERM)
    code = world.live.process.wait(timeout=LIMIT_S)
    if code != 0:
        raise ChaosFailed(f"SIGTERM ended the server with {code}")


def fill_the_disk(world: World, rng: Random) -> None:
    """No file can grow beyond a few bytes: neither pages nor lines of logs can be written."""
    n_log_bytes = world.request_log.stat().st_size
    n_bytes = rng.choice((0, 100, 4096, n_log_bytes + 500))  # the last one ends within a line of the log
    with (
        limited(world.live.process.pid, resource.RLIMIT_FSIZE, n_bytes),
        limited(world.live.runtime_pid, resource.RLIMIT_FSIZE, n_bytes),
    ):
        time.sleep(rng.uniform(1, 4))


def fill_the_disk_and_kill_the_runtime(world: World, rng: Random) -> None:
    """The frontend cannot write that the runtime has died."""
    with limited(world.live.process.pid, resource.RLIMIT_FSIZE, 0):
        os.kill(world.live.runtime_pid, signal.SIGKILL)
        wait_for(lambda: not is_running(world.live.runtime_pid), "the runtime is not dead")
        time.sleep(0.5)
    # The next runtime may have been spawned under the limit, and have it still.
    world.wait_for_next_runtime()
    _, hard = resource.prlimit(world.live.runtime_pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.live.runtime_pid, resource.RLIMIT_FSIZE, (hard, hard))


def take_the_frontends_files(world: World, rng: Random) -> None:
    """Only a few more connections can be opened than there are."""
    pid = world.live.process.pid
    with limited(pid, resource.RLIMIT_NOFILE, len(open_files(pid)) + rng.randint(0, 2)), ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", world.live.port)))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(rng.uniform(1, 3))


def take_the_runtimes_files(world: World, rng: Random) -> None:
    """No page can be written to a file or read from one."""
    pid = world.live.runtime_pid
    with limited(pid, resource.RLIMIT_NOFILE, len(open_files(pid)) + rng.randint(0, 1)):
        time.sleep(rng.uniform(1, 4))


def run_out_of_device_memory(world: World, rng: Random) -> None:
    check_reply(world, NO_MEMORY, rng, 500, "device_error")
    check_reply(world, NO_MEMORY_ONCE, rng, 200)


def compute_nan(world: World, rng: Random) -> None:
    check_reply(world, NOT_FINITE_ONCE, rng, 200)


def lose_the_device(world: World, rng: Random) -> None:
    check_reply(world, LOST, rng, 503, "runtime_died")
    world.wait_for_next_runtime()


def crash_the_runtime(world: World, rng: Random) -> None:
    check_reply(world, DIES, rng, 503, "runtime_died")
    world.wait_for_next_runtime()


def jump_the_clock(world: World, rng: Random) -> None:
    """Sets the clocks of both processes forward or back, twice, and right again at a later fault or never."""
    for _ in range(2):
        days = rng.choice((-20_000, -365, -1, 0, 1, 365, 10_000))
        set_clock(world.clock, days * DAY_S)
        time.sleep(rng.uniform(0.5, 2))


def read_slowly(world: World, rng: Random) -> None:
    """Several clients read a long stream in drops; some leave in the middle."""
    body = {"prompt": [7] * 200, "echo": True, "logprobs": 20, "n": 4, "max_tokens": 60, "ignore_eos": True}
    failures: list[str] = []

    def read(leaves: bool) -> None:
        received = b""
        with connected(world, {**body, "stream": True}) as connection:
            for _ in range(40):
                received += connection.recv(512)
                time.sleep(0.05)
            if leaves:
                return
            while b"data: [DONE]" not in received:
                part = connection.recv(1 << 16)
                if not part:
                    failures.append(received[-300:].decode())
                    return
                received += part
        if b'"error"' in received:
            failures.append(received[-300:].decode())

    threads = [threading.Thread(target=read, args=(rng.random() < 0.5,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if failures or any(thread.is_alive() for thread in threads):
        raise ChaosFailed(f"a client that reads slowly has no whole answer: {failures}")


def send_half_a_request(world: World, rng: Random) -> None:
    """Clients send part of a request, and then nothing, an end or a reset."""
    whole = f"{HEAD}Content-Length: 100\r\n\r\n".encode() + json.dumps({"prompt": "x" * 200}).encode()
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", world.live.port)))
            connection.sendall(whole[: rng.randrange(190)])
            if rng.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
            elif rng.random() < 0.5:
                reset(connection)
        time.sleep(rng.uniform(0.5, 2))


def die_as_a_client(world: World, rng: Random) -> None:
    """Clients ask for long answers, streamed or not, and reset the connection."""
    for _ in range(12):
        body = {"prompt": "x " * rng.randint(1, 500), "max_tokens": 400, "ignore_eos": True, "n": rng.randint(1, 3)}
        with connected(world, {**body, "stream": rng.random() < 0.5}) as connection:
            time.sleep(rng.uniform(0, 0.3))
            reset(connection)


FAULTS = (
    Fault("kill_runtime", kill_runtime, RESTART),
    Fault("hang_runtime", hang_runtime, RESTART),
    Fault("pause_runtime", pause_runtime, frozenset({"runtime_silent"})),
    Fault("pause_frontend", pause_frontend),
    Fault("kill_frontend", kill_frontend, DRAIN),
    Fault("terminate", terminate, DRAIN),
    Fault("fill_the_disk", fill_the_disk),
    Fault("fill_the_disk_and_kill_the_runtime", fill_the_disk_and_kill_the_runtime, RESTART),
    Fault("take_the_frontends_files", take_the_frontends_files, frozenset({CUT})),
    Fault("take_the_runtimes_files", take_the_runtimes_files),
    Fault("run_out_of_device_memory", run_out_of_device_memory),
    Fault("compute_nan", compute_nan),
    Fault("lose_the_device", lose_the_device, RESTART),
    Fault("crash_the_runtime", crash_the_runtime, RESTART),
    Fault("jump_the_clock", jump_the_clock),
    Fault("read_slowly", read_slowly),
    Fault("send_half_a_request", send_half_a_request),
    Fault("die_as_a_client", die_as_a_client),
)


def check_reply(world: World, pair: tuple[int, int], rng: Random, status: int, code: str | None = None) -> None:
    """Sends a prompt with a pair that breaks the device, and checks the reply."""
    prompt = [*(rng.randrange(10, 2000) for _ in range(40)), *pair]
    reply = post(world.live, {"prompt": prompt, "max_tokens": 4, "temperature": 0})
    if reply.status_code != status or (code is not None and reply.json()["error"]["code"] != code):
        raise ChaosFailed(f"{status} {code} was expected for {pair}, and {reply.status_code} came: {reply.text}")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def limited(pid: int, kind: int, value: int) -> Iterator[None]:
    """Lowers a soft limit of a process."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (value, before[1]))
    try:
        yield
    finally:
        if is_running(pid):
            resource.prlimit(pid, kind, before)


@contextmanager
def connected(world: World, body: dict[str, object]) -> Iterator[socket.socket]:
    """Opens a connection with small buffers that has sent a request."""
    content = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.settimeout(LIMIT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", world.live.port))
        connection.sendall(f"{HEAD}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield connection


def reset(connection: socket.socket) -> None:
    """Closes a connection with a reset, as a machine does that has lost it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
