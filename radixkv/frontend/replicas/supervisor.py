"""Supervision of several runtime processes, of which any may die while the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from radixkv.errors import RuntimeDied
from radixkv.frontend.metrics.log import log_line
from radixkv.frontend.supervisor import Supervisor


class ReplicaSupervisor:
    """Runs a ``Supervisor`` for each replica; the server ends with the last of them.

    Args:
        supervisors: of the replicas, in their order.
    """

    def __init__(self, supervisors: Sequence[Supervisor]) -> None:
        self._supervisors = tuple(supervisors)
        self._is_stopping = False

    async def run(self, heartbeat_timeout_s: float) -> RuntimeDied:
        """Supervises until no replica is left; returns the error that ended the last one.

        Args:
            heartbeat_timeout_s: a process that sends nothing for longer is killed.
        """
        runs = {
            asyncio.create_task(supervisor.run(heartbeat_timeout_s)): index
            for index, supervisor in enumerate(self._supervisors)
        }
        waiting = set(runs)
        try:
            while True:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for run in ended:
                    if not waiting:
                        return run.result()
                    if not self._is_stopping:
                        log_line(f"replica {runs[run]} is lost, the other {len(waiting)} serve on: {run.result()}")
        finally:
            for run in waiting:
                run.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def stop_restarting(self) -> None:
        """Starts no process again that dies from now on."""
        self._is_stopping = True
        for supervisor in self._supervisors:
            supervisor.stop_restarting()

    def kill(self) -> None:
        """Kills the processes that are in the middle of their work; ``stop`` must follow."""
        for supervisor in self._supervisors:
            supervisor.kill()

    async def stop(self) -> None:
        """Ends all processes: by a drain if they are idle, by a kill otherwise. ``run`` must have ended."""
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))
