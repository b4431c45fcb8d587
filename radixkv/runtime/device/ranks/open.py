"""Opening of the device, or of all ranks of one."""

from __future__ import annotations

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.collectives import GlooCollectives
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.factory import open_executor
from radixkv.runtime.device.ranks.fan_out import FanOut
from radixkv.runtime.device.ranks.processes import RankProcesses
from radixkv.runtime.device.ranks.rank import COLLECTIVE_TIMEOUT_S
from radixkv.runtime.device.resolved_config import ResolvedConfig
from radixkv.runtime.device.start_times import StartTimes
from radixkv.runtime.step.executor import Executor


def open_ranks(resolved: ResolvedConfig, checkpoint: Checkpoint, times: StartTimes | None = None) -> Executor:
    """Loads the model, on one device or on as many ranks as the settings say. Takes seconds.

    Args:
        resolved: as ``resolve_config`` returned it.
        checkpoint: checkpoint with its weights.
        times: gets the times of the stages.

    Raises:
        CheckpointError: the checkpoint cannot be run.
        ConfigError: the settings do not fit the checkpoint or the machine.
    """
    settings = resolved.device_settings
    n_ranks = settings.tensor_parallel_size
    if n_ranks == 1:
        return open_executor(resolved, checkpoint, times)
    times = times or StartTimes()
    ranks = RankProcesses.start(checkpoint.folder, settings)
    try:
        collectives = GlooCollectives(0, n_ranks, ranks.store)
        executor = CpuExecutor(checkpoint, settings, collectives)
        times.end("weights and pool")
        n_pages = min([executor.n_pages, *ranks.wait_ready()])
        ranks.connect(collectives, COLLECTIVE_TIMEOUT_S)
        times.end("other ranks")
    except BaseException:
        ranks.close()
        raise
    return FanOut(executor, ranks, n_pages)
