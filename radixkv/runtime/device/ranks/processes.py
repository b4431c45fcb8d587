"""The processes of all ranks but rank 0, which starts them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from radixkv.errors import ConfigError, DeviceLost
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.ranks.frames import Frames, RankReady, RankRefused, RankStart, decode, encode

_MAX_CLOSE_S = 5.0
_MAX_REAP_S = 0.2
"""How long the end of a process is waited for where its socket has ended."""


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
        self._frames.append(Frames(ours))
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

    def send(self, frame: bytes) -> None:
        """Sends a frame to all ranks. Raises ``DeviceLost`` if one has ended."""
        try:
            for frames in self._frames:
                frames.send(frame)
        except OSError as error:
            raise self.lost(str(error)) from None

    def lost(self, error: str) -> DeviceLost:
        """Returns the error of a step that failed here with ``error``: that a rank has ended, if one has."""
        return DeviceLost(self._ended() or f"a step failed, in which the other ranks wait: {error}")

    def close(self) -> None:
        """Ends the processes. Takes up to 5 s if one hangs."""
        for frames in self._frames:
            frames.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_MAX_CLOSE_S)
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _ended(self) -> str | None:
        """Returns which rank has ended, and how; None: none has. Takes up to 0.2 s a rank."""
        for rank, process in enumerate(self._processes, 1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_MAX_REAP_S)
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"rank {rank} of the model {how}"
        return None
