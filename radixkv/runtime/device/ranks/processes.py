"""The processes of all ranks but rank 0, which starts them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from radixkv.errors import ConfigError, DeviceError, DeviceLost
from radixkv.runtime.device.collectives import GlooCollectives
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.ranks.frames import CONNECT, Frames, RankReady, RankRefused, RankStart, decode, encode

_MAX_CLOSE_S = 5.0
"""How long ranks have to end by themselves."""
_MAX_REAP_S = 1.0
"""How long the end of a process is waited for where its socket has ended."""
_MAX_SEND_S = 10.0
"""How long a rank may take no frame."""


class RankProcesses:
    """The other ranks, each in a process. Use ``start`` to create them.

    A rank ends when its socket does, so also when this process is killed. Ranks are in this process's group, so
    that whoever kills the group reaches them.
    """

    def __init__(self, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._frames: list[Frames] = []

    @classmethod
    def start(cls, model: Path, settings: DeviceSettings) -> Self:
        """Starts the processes, which load their parts of the model meanwhile.

        Args:
            model: folder of the checkpoint.
            settings: of each rank.
        """
        ranks = cls(tempfile.TemporaryDirectory(prefix="radixkv-ranks-"))
        try:
            for rank in range(1, settings.tensor_parallel_size):
                ranks._start(RankStart(rank, str(model), settings, str(ranks.store)))
        except BaseException:
            ranks.close()
            raise
        return ranks

    def _start(self, start: RankStart) -> None:
        ours, theirs = socket.socketpair()
        self._frames.append(Frames(ours, max_send_s=_MAX_SEND_S))
        with theirs:
            command = [sys.executable, "-m", "radixkv.runtime.device.ranks.rank", str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL))
        self._frames[-1].send(encode(start))

    @property
    def store(self) -> Path:
        """File by which the ranks find each other."""
        return Path(self._folder.name) / "store"

    def wait_ready(self) -> Sequence[int]:
        """Waits until all ranks have loaded their parts; returns the pages of their pools.

        Raises:
            ConfigError: a rank cannot compute, or has ended.
        """
        n_pages = []
        for frames in self._frames:
            frame = frames.receive()
            if frame is None:
                raise ConfigError(
                    f"{self._ended() or 'a rank of the model closed its socket'} while it loaded its "
                    "part of the model; the lines before say why"
                )
            answer = decode(frame, RankReady | RankRefused)
            if isinstance(answer, RankRefused):
                raise ConfigError(answer.message)
            n_pages.append(answer.n_pages)
        return n_pages

    def connect(self, collectives: GlooCollectives, timeout_s: float) -> None:
        """Connects all ranks, which are ready, and this one.

        Args:
            collectives: of rank 0.
            timeout_s: how long a rank waits for the others, here and later.

        Raises:
            ConfigError: a rank has ended, or does not connect.
        """
        try:
            self.send(CONNECT)
            collectives.connect(timeout_s)
        except (DeviceError, DeviceLost) as error:
            raise ConfigError(
                f"the ranks of the model cannot connect: {self._ended() or error}; the lines before say why"
            ) from None
        self._folder.cleanup()  # all have found each other

    def send(self, frame: bytes) -> None:
        """Sends a frame to all ranks.

        Raises:
            DeviceLost: one has ended, or takes no frame.
        """
        try:
            for frames in self._frames:
                frames.send(frame)
        except OSError as error:
            raise self.lost(str(error)) from None

    def lost(self, error: str) -> DeviceLost:
        """Returns the error of a step that failed here with ``error``: that a rank has ended, if one has."""
        return DeviceLost(self._ended() or f"a step failed for all ranks of the model: {error}")

    def close(self) -> None:
        """Ends the processes; kills those that have not ended after 5 s."""
        deadline = time.monotonic() + _MAX_CLOSE_S
        try:
            for frames in self._frames:
                frames.close()
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            self._folder.cleanup()

    def _ended(self) -> str | None:
        """Returns which rank has ended, and how; None: none has. Takes up to ``_MAX_REAP_S``.

        Where one is killed, others end with an exit code, because they cannot go on.
        """
        deadline = time.monotonic() + _MAX_REAP_S
        while True:
            codes = {rank: code for rank, one in enumerate(self._processes, 1) if (code := one.poll()) is not None}
            if codes or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if not codes:
            return None
        rank = min(codes, key=lambda rank: (codes[rank] >= 0, rank))
        code = codes[rank]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} of the model {how}"
