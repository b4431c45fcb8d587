"""The processes of all ranks but rank 0, which starts them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self

from radixkv.errors import ConfigError, DeviceLost
from radixkv.runtime.device.collectives import COLLECTIVE_TIMEOUT_S
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.ranks.frames import (
    Frames,
    RankRefused,
    RankStart,
    RankStore,
    RankValue,
    decode,
    encode,
)
from radixkv.settings.config import Device

_MAX_CLOSE_S = 5.0
"""How long ranks have to end by themselves."""
_MAX_REAP_S = 1.0
"""How long the end of a process is waited for where its socket has ended."""
_MAX_SOCKET_END_S = 0.2
"""How long the end of a socket is waited for where another connection of the rank may have ended."""
_MAX_SEND_S = 10.0
"""How long a rank may take to receive a frame."""
_MAX_LATE_S = 600.0
"""How long a rank may come to a meeting of the start after rank 0, which has as much to load and to compile."""
_MAX_SILENCE_S = 10.0
"""How long a rank that is ready may give no sign of life: then its process is stopped, or hangs."""
_WATCH_INTERVAL_S = 0.5


class RankProcesses:
    """The other ranks, each in a process: the ``RankGroup`` of rank 0. Use ``start`` to create them.

    A rank ends when its socket does, so also when this process is killed. Ranks are in this process's group, so
    that whoever kills the group reaches them.
    """

    rank = 0

    def __init__(self, device: Device) -> None:
        self._device = device
        self._processes: list[subprocess.Popen[bytes]] = []
        self._frames: list[Frames] = []
        self.copies: list[Frames] = []
        """Streams to the other ranks for copies."""
        self.adapters: list[Frames] = []
        """Streams from the other ranks with answers about adapters."""
        self._sending = threading.Lock()
        """Held while a frame is sent: threads that load adapters send, too."""
        self.memory = os.memfd_create("radixkv-host-memory", os.MFD_CLOEXEC)
        """Descriptor of the host memory that the ranks share, empty at first."""
        self._beats: list[int] = []
        """Descriptors of the ranks' counts of signs of life."""
        self._watch: _Watch | None = None
        self._give_up: Callable[[], None] | None = None
        self._cause: str | None = None
        """Why the ranks cannot go on; None: they can."""

    @classmethod
    def start(cls, n_ranks: int, device: Device) -> Self:
        """Starts the processes, which import what they need meanwhile. ``open`` must follow.

        Args:
            n_ranks: ranks, this process included.
            device: kind of the ranks' devices.
        """
        ranks = cls(device)
        try:
            for _ in range(1, n_ranks):
                ranks._start()
        except BaseException:
            ranks.close()
            raise
        return ranks

    def open(self, model: Path, settings: DeviceSettings) -> None:
        """Lets the processes load their parts of the model.

        Args:
            model: folder of the checkpoint.
            settings: of each rank; they leave no choice to it.

        Raises:
            ConfigError: one has ended.
        """
        try:
            for rank, frames in enumerate(self._frames, 1):
                frames.send(encode(RankStart(rank, str(model), self._device, settings, os.getpid())))
        except OSError as error:
            raise self.start_error(str(error)) from None

    def _start(self) -> None:
        (ours, theirs), (our_copies, their_copies), (our_adapters, their_adapters) = (
            socket.socketpair() for _ in range(3)
        )
        self._frames.append(Frames(ours, max_send_s=_MAX_SEND_S))
        self.copies.append(Frames(our_copies, max_send_s=_MAX_SEND_S))
        self.adapters.append(Frames(our_adapters))
        self._beats.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        with theirs, their_copies, their_adapters:
            inherited = [
                *(theirs.fileno(), their_copies.fileno(), self.memory, self._beats[-1]),
                their_adapters.fileno(),
            ]
            command = [sys.executable, "-m", "radixkv.runtime.device.ranks.rank", *map(str, inherited)]
            self._processes.append(subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL))

    @property
    def size(self) -> int:
        """See ``RankGroup.size``."""
        return len(self._processes) + 1

    @contextlib.contextmanager
    def connecting(self) -> Iterator[Path]:
        """See ``RankGroup.connecting``."""
        self._values()
        # The folder is not made sooner: it would stay where all are killed while they load. Where the start fails,
        # other ranks may write into it while it is removed.
        with tempfile.TemporaryDirectory(prefix="radixkv-ranks-", ignore_cleanup_errors=True) as folder:
            store = Path(folder) / "store"
            self.send(encode(RankStore(str(store))))
            yield store
            self.minimum(0)

    def minimum(self, value: int) -> int:
        """See ``RankGroup.minimum``."""
        least = min(value, *self._values())
        self.send(encode(RankValue(least)))
        return least

    def _values(self) -> list[int]:
        """Waits until all other ranks have come to a meeting; returns their values."""
        values = []
        absent = set(range(1, self.size))
        deadline = time.monotonic() + _MAX_LATE_S
        while absent:
            # Where a rank refuses, others may wait for it until they are killed.
            ready = self._ready(absent, max(0.0, deadline - time.monotonic()))
            if not ready:
                rank = min(absent)
                raise ConfigError(
                    f"{self.name(rank)} does not get ready: rank 0 has waited for it for {_MAX_LATE_S:g} s; see "
                    f"what its process {self._processes[rank - 1].pid} waits for, and start again"
                )
            for rank in ready:
                absent.remove(rank)
                answer = self._answer(rank)
                if isinstance(answer, RankRefused):
                    raise ConfigError(f"{self.name(rank)}: {answer.message}")
                if answer is None:
                    raise self.start_error("a rank closed its socket")
                values.append(answer.value)
        return values

    def wait_ready(self) -> None:
        """Waits until all ranks can execute plans.

        Raises:
            ConfigError: a rank cannot, or has ended.
        """
        self.minimum(0)
        if self._watch is not None:
            self._watch.waits_since = None
            self._watch.is_ready = True
        self.check()

    def watch(self, give_up: Callable[[], None]) -> None:
        """See ``RankGroup.watch``."""
        self._give_up = give_up
        self._watch = _Watch([process.pid for process in self._processes], self._beats, self._lose)
        self._watch.waits_since = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Limits the time of a block that waits for a step. Ranks must be watched.

        Raises:
            DeviceLost: a rank is lost, or the step has hung, so that what the block did means nothing.
        """
        assert self._watch is not None, "whoever opens the device watches the ranks"
        self._watch.waits_since = time.monotonic()
        try:
            yield
        finally:
            self._watch.waits_since = None
        self.check()

    def check(self) -> None:
        """Raises ``DeviceLost`` if a rank is lost: what kernels computed since then means nothing. O(1)."""
        if self._watch is not None and self._watch.loss is not None:
            raise self._lose(self._watch.loss)
        if self._cause is not None:
            raise DeviceLost(self._cause)

    def send(self, frame: bytes) -> None:
        """Sends a frame to all ranks, which get frames in the order of these calls. Any thread may call it.

        Raises:
            DeviceLost: one has ended, or takes no frame.
        """
        self.check()
        try:
            with self._sending:
                for frames in self._frames:
                    frames.send(frame)
        except OSError as error:
            raise self.lost(str(error)) from None

    def lost(self, error: str, what: str = "a step") -> DeviceLost:
        """Returns the error of what failed here with ``error``: that a rank has ended, if one has.

        The ranks are killed, because they wait for this one in the step. The first cause stays. Safe in any thread.
        """
        return self._lose(f"{what} failed for all ranks of the model: {error}")

    def _lose(self, cause: str) -> DeviceLost:
        """Kills the ranks; returns the error of their loss, whose cause is that a rank has ended, if one has."""
        if self._give_up is not None:
            self._give_up()
        if self._cause is None:
            cause = self._end_of_one() or cause
            self._cause = self._cause or cause
        for process in self._processes:
            process.kill()
        return DeviceLost(self._cause)

    def start_error(self, error: str) -> ConfigError:
        """Returns the error of a start that failed here with ``error``.

        It says that a rank has ended, or what it has refused, if one has. Takes up to ``_MAX_REAP_S``.
        """
        ended = None if self._cause else self._end_of_one()
        if ended is None and (refusal := self._refusal()) is not None:
            return ConfigError(refusal)
        cause = ended or self._cause or error
        return ConfigError(f"the ranks of the model cannot start: {cause}; the lines before say why")

    def close(self) -> None:
        """Ends the processes; kills those that have not ended after 5 s. May be called again."""
        deadline = time.monotonic() + _MAX_CLOSE_S
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        try:
            for frames in (*self._frames, *self.copies, *self.adapters):
                frames.close()
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            if self.memory >= 0:
                os.close(self.memory)
                self.memory = -1
            while self._beats:
                os.close(self._beats.pop())
            if self._give_up is not None:
                self._give_up()  # nobody comes any more
                self._give_up = None

    def _end_of_one(self) -> str | None:
        """Returns which rank has ended, and how; None: none has. Takes up to ``_MAX_REAP_S`` if a socket has ended.

        Where one is killed, others end with an exit code, because they cannot go on. One that has refused
        to compute ends with 0.
        """
        begun = time.monotonic()
        while True:
            codes = {rank: code for rank, one in enumerate(self._processes, 1) if (code := one.poll())}
            limit_s = _MAX_REAP_S if self._has_ended_socket() else _MAX_SOCKET_END_S
            if codes or time.monotonic() - begun > limit_s:
                break
            time.sleep(0.01)
        if not codes:
            return None
        rank = min(codes, key=lambda rank: (codes[rank] >= 0, rank))
        code = codes[rank]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} of the model {how}"

    def _has_ended_socket(self) -> bool:
        """Returns whether a rank has closed its socket, as at its end."""
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):  # ``close`` has closed it here
            for frames in self._frames:
                poll.register(frames.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _ready(self, ranks: Iterable[int], timeout_s: float) -> list[int]:
        """Waits until one of these ranks has answered or ended; returns all that have, none after a time-out."""
        descriptors = {rank: self._frames[rank - 1].fileno() for rank in ranks}
        ready = wait(list(descriptors.values()), timeout_s)
        return [rank for rank, descriptor in descriptors.items() if descriptor in ready]

    def _answer(self, rank: int) -> RankValue | RankRefused | None:
        """Waits for the next answer of a rank; None if it has ended."""
        frame = self._frames[rank - 1].receive()
        if frame is None:
            return None
        answer: RankValue | RankRefused = decode(frame, RankValue | RankRefused)
        return answer

    def _refusal(self) -> str | None:
        """Returns the first refusal that has come and was not read; None: there is none."""
        for rank in self._ready(range(1, self.size), 0.0):
            if isinstance(answer := self._answer(rank), RankRefused):
                return f"{self.name(rank)}: {answer.message}"
        return None

    def name(self, rank: int) -> str:
        """Returns what errors call a rank."""
        return f"rank {rank} ({self._device if self._device == 'cpu' else f'{self._device}:{rank}'})"


class _Watch:
    """A thread that calls a function once a process ends, gives no sign of life, or hangs with what is waited for.

    A process that runs gives signs of life, whatever it computes: how long that takes says little.

    Args:
        pids: of the processes.
        beats: a descriptor for each, an event of which it adds to the count as a sign of life.
        on_loss: the function, which gets the reason.
    """

    def __init__(self, pids: list[int], beats: list[int], on_loss: Callable[[str], object]) -> None:
        self.loss: str | None = None
        """Why the function was called; None: it was not."""
        self.is_ready = False
        """Whether silence is a loss. A process that loads may hold the interpreter's lock for long."""
        self.waits_since: float | None = None
        """When the wait for a step began, or for the rest of the start; None: nothing is waited for."""
        self._on_loss = on_loss
        self._beats = list(beats)
        self._closed = os.eventfd(0)
        self._processes = [os.pidfd_open(pid) for pid in pids]
        self._thread = threading.Thread(target=self._run, name="radixkv-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Processes may end from now on."""
        os.eventfd_write(self._closed, 1)
        self._thread.join()
        for descriptor in (self._closed, *self._processes):
            os.close(descriptor)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._closed, *self._processes):
            poll.register(descriptor, select.POLLIN)
        # Rounds are counted, because what the clock says may mean that this process was stopped, too.
        n_late, n_silent = 0, [0] * len(self._beats)
        while self.loss is None:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * _WATCH_INTERVAL_S)}
            if self._closed in ready:
                return
            since = self.waits_since
            is_late = since is not None and time.monotonic() - since > COLLECTIVE_TIMEOUT_S
            n_late = n_late + 1 if is_late else 0
            for index, beats in enumerate(self._beats):
                n_silent[index] = n_silent[index] + 1 if self.is_ready and not _take_beats(beats) else 0
            longest = max(n_silent, default=0)
            if ready:
                self.loss = "another rank of the model has ended"
            elif _WATCH_INTERVAL_S * longest > _MAX_SILENCE_S:
                rank = 1 + n_silent.index(longest)
                self.loss = f"rank {rank} of the model has given no sign of life for {_MAX_SILENCE_S:g} s"
            elif n_late > 1:
                self.loss = f"another rank of the model does not respond in {COLLECTIVE_TIMEOUT_S:g} s"
        self._on_loss(self.loss)


def _take_beats(descriptor: int) -> bool:
    """Returns whether there were signs of life since the last call."""
    try:
        return os.eventfd_read(descriptor) > 0
    except BlockingIOError:
        return False
