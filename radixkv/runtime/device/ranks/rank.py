"""``python -m radixkv.runtime.device.ranks.rank DESCRIPTOR``: a rank that executes rank 0's plans.

It ends when rank 0 ends or closes the socket, and when a step fails: the others cannot go on without it.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from radixkv.checkpoints import resolve
from radixkv.errors import DeviceError, RadixKVError
from radixkv.runtime.device.collectives import GlooCollectives
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.ranks.frames import Frames, RankReady, RankRefused, RankStart, decode, encode
from radixkv.runtime.step.plan import StepPlan

COLLECTIVE_TIMEOUT_S = 10.0
"""How long a rank waits for the others in a step: then one hangs, and none can go on."""


def main() -> None:
    """Loads this rank's part of the model, and executes plans until the socket ends."""
    frames = Frames(socket.socket(fileno=int(sys.argv[1])))
    first = frames.receive()
    if first is None:
        return
    start: RankStart = decode(first, RankStart)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(format=f"rank {start.rank}: %(message)s")
    settings = start.settings
    with suppress(BrokenPipeError):  # rank 0 has ended, and so has the socket
        try:
            collectives = GlooCollectives(start.rank, settings.tensor_parallel_size, Path(start.store))
            executor = CpuExecutor(resolve(start.model, load_format=settings.load_format), settings, collectives)
        except RadixKVError as error:
            frames.send(encode(RankRefused(str(error))))
            return
        frames.send(encode(RankReady(executor.n_pages)))
    if frames.receive() is None:
        return
    # Ctrl-C reaches all processes of a terminal. While they load it ends each; later rank 0 decides when they end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collectives.connect(COLLECTIVE_TIMEOUT_S)
    while (frame := frames.receive()) is not None:
        try:
            executor.launch(decode(frame, StepPlan)).sample(None).result()
        except DeviceError:  # it is logged
            sys.exit(1)


if __name__ == "__main__":
    main()
