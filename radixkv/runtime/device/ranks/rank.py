"""``python -m radixkv.runtime.device.ranks.rank PLANS COPIES MEMORY BEATS ADAPTERS``: executes rank 0's plans.

The arguments are descriptors: of the sockets for plans and for copies, of the host memory that ranks share, of an
event to whose count the rank adds as a sign of life, and of the socket for answers about adapters.

It ends when rank 0's process does, whatever it does then; when rank 0 closes the socket; and when a step fails: the
others cannot go on without it.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from radixkv.checkpoints import resolve
from radixkv.errors import DeviceError, DeviceLost, RadixKVError
from radixkv.runtime.device.factory import look_at_machine, open_executor
from radixkv.runtime.device.ranks.adapter_server import AdapterServer
from radixkv.runtime.device.ranks.copy_server import serve_copies
from radixkv.runtime.device.ranks.frames import (
    AdapterFrame,
    Frames,
    RankRefused,
    RankStart,
    RankStore,
    RankValue,
    decode,
    encode,
)
from radixkv.runtime.device.start_times import StartTimes
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import SampledStep

logger = logging.getLogger(__name__)

_BEAT_INTERVAL_S = 0.5
"""Time between signs of life."""


def main() -> None:
    """Loads this rank's part of the model, and executes plans until the socket ends."""
    frames, copies, adapters = (
        Frames(socket.socket(fileno=int(descriptor))) for descriptor in (*sys.argv[1:3], sys.argv[5])
    )
    first = frames.receive()
    if first is None:
        return
    start: RankStart = decode(first, RankStart)
    _end_with(start.parent_pid, int(sys.argv[4]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(format=f"rank {start.rank}: %(message)s")
    with suppress(BrokenPipeError):  # rank 0 has ended, and so has the socket
        try:
            executor = _open(start, frames)
        except RadixKVError as error:
            frames.send(encode(RankRefused(str(error))))
            return
        serving = threading.Thread(
            target=_serve_copies, args=(start, executor, copies), name="radixkv-copies", daemon=True
        )
        serving.start()
        try:
            _execute(executor, frames, adapters)
            serving.join()  # processes that ended beside this thread were often aborted
        except Exception as error:  # also one of host memory that has run out
            logger.error("%s", error, exc_info=not isinstance(error, DeviceError | DeviceLost))
            logging.shutdown()
            os._exit(1)  # at its end Python could wait for kernels, which wait for other ranks


def _open(start: RankStart, frames: Frames) -> Executor:
    settings = start.settings
    if start.device == "cuda":
        torch.cuda.set_device(start.rank)
    group = _Group(start, frames)
    executor = open_executor(
        start.device,
        look_at_machine(start.device),
        settings,
        resolve(start.model, load_format=settings.load_format, task=settings.task),
        StartTimes(),
        group,
    )
    # A terminal's Ctrl-C reaches all its processes, and a service manager's SIGTERM all of a service. From now on
    # rank 0 decides when the ranks end: it may have requests to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    group.minimum(0)
    return executor


def _serve_copies(start: RankStart, executor: Executor, copies: Frames) -> None:
    if start.device == "cuda":
        torch.cuda.set_device(start.rank)  # of this thread
    serve_copies(executor, copies, int(sys.argv[3]))


def _end_with(parent_pid: int, beats: int) -> None:
    """Ends this process when its parent does, at once. Gives signs of life until then, whatever is computed."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != parent_pid:  # the number may be another process's by now
        sys.exit(1)
    poll = select.poll()
    poll.register(parent, select.POLLIN)

    def wait() -> None:
        while not poll.poll(1000 * _BEAT_INTERVAL_S):
            os.eventfd_write(beats, 1)
        os._exit(1)

    threading.Thread(target=wait, name="radixkv-rank-0", daemon=True).start()


def _execute(executor: Executor, frames: Frames, answers: Frames) -> None:
    """Executes plans, and what rank 0 does with adapters between them, until the socket ends.

    Args:
        executor: of this rank.
        frames: from rank 0.
        answers: to rank 0, about adapters.

    Raises:
        DeviceError: a step failed.
    """
    adapters = None if executor.adapters is None else AdapterServer(executor.adapters, answers)
    gc.collect()
    gc.freeze()
    gc.disable()
    earlier: SampledStep | None = None
    while (frame := frames.receive()) is not None:
        message: StepPlan | AdapterFrame = decode(frame, StepPlan | AdapterFrame)
        if not isinstance(message, StepPlan):
            assert adapters is not None, "rank 0 has adapters"
            adapters.receive(message)
            continue
        step = executor.launch(message).sample(None)
        if not executor.is_asynchronous:
            step.result()
            continue
        if earlier is not None:
            earlier.result()
        earlier = step
    if earlier is not None:
        earlier.result()  # rank 0's kernels may still wait for this rank's
    if adapters is not None:
        adapters.close()


class _Group:
    """A ``RankGroup`` as another rank than rank 0 sees it.

    Args:
        start: of this rank.
        frames: to and from rank 0.
    """

    def __init__(self, start: RankStart, frames: Frames) -> None:
        self.rank = start.rank
        self.size = start.settings.tensor_parallel_size
        self._frames = frames

    @contextmanager
    def connecting(self) -> Iterator[Path]:
        """See ``RankGroup.connecting``; ends this process if rank 0 has ended."""
        answer: RankStore = decode(self._meet(0), RankStore)
        yield Path(answer.path)
        self.minimum(0)

    def minimum(self, value: int) -> int:
        """See ``RankGroup.minimum``; ends this process if rank 0 has ended."""
        answer: RankValue = decode(self._meet(value), RankValue)
        return answer.value

    def _meet(self, value: int) -> bytes:
        """Returns rank 0's answer to a value."""
        self._frames.send(encode(RankValue(value)))
        frame = self._frames.receive()
        if frame is None:
            sys.exit(0)
        return frame

    def watch(self, give_up: Callable[[], None]) -> None:
        """See ``RankGroup.watch``; nothing, because rank 0 watches all, and this process ends with it."""


if __name__ == "__main__":
    main()
