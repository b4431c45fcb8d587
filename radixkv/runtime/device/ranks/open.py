"""Opening of the device, or of all ranks of one."""

from __future__ import annotations

from radixkv.checkpoints import Checkpoint
from radixkv.errors import DeviceError, DeviceLost
from radixkv.runtime.device.factory import choose_for_ranks, open_executor
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ranks.fan_out import FanOut
from radixkv.runtime.device.ranks.processes import RankProcesses
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
    times = times or StartTimes()
    device, machine, settings = resolved.device, resolved.machine, resolved.device_settings
    if settings.tensor_parallel_size == 1:
        return open_executor(device, machine, settings, checkpoint, times)
    config = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    config.shard(settings.tensor_parallel_size)  # refuses what is not divided before any rank starts
    ranks = RankProcesses.start(settings.tensor_parallel_size, device)
    opened: RankProcesses | FanOut = ranks
    try:
        settings = choose_for_ranks(device, machine, settings, checkpoint)
        ranks.open(checkpoint.folder, settings)
        opened = FanOut(
            open_executor(device, machine, settings, checkpoint, times, ranks),
            ranks,
            config.n_page_parts(ranks.size),
        )
        ranks.wait_ready()
    except (DeviceError, DeviceLost) as error:
        refused = ranks.start_error(str(error))
        opened.close()
        raise refused from None
    except BaseException:
        opened.close()
        raise
    times.end("other ranks")
    return opened
