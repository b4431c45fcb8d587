"""The settings and the environment of one replica."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from radixkv.errors import ConfigError, shortened
from radixkv.settings.config import EngineConfig
from radixkv.settings.kv_events import KVEventsConfig

_GPUS = "CUDA_VISIBLE_DEVICES"


def engine_of_replica(engine: EngineConfig, index: int, n_replicas: int) -> EngineConfig:
    """Returns the settings of one replica: it has a part of the memory and of the disk, and its own endpoints.

    Args:
        engine: the server's settings.
        index: the replica's number.
        n_replicas: all of them.

    Raises:
        ConfigError: the endpoints of two replicas are the same, or a port is too high.
    """
    cache, events = engine.cache, engine.kv_events
    if cache.host_memory_bytes is not None:
        cache = dataclasses.replace(cache, host_memory_bytes=cache.host_memory_bytes // n_replicas)
    if cache.cache_dir is not None:
        n_bytes = cache.cache_dir_bytes
        cache = dataclasses.replace(
            cache,
            cache_dir=f"{cache.cache_dir}/replica-{index}",
            cache_dir_bytes=None if n_bytes is None else n_bytes // n_replicas,
        )
    if events is not None:
        _check_endpoints(events, n_replicas)
        replay = events.replay_endpoint
        events = dataclasses.replace(
            events,
            endpoint=_endpoint(events.endpoint, index),
            replay_endpoint=None if replay is None else _endpoint(replay, index),
        )
    return dataclasses.replace(engine, cache=cache, kv_events=events)


def environment_of_replica(
    environment: Mapping[str, str], index: int, n_replicas: int, n_ranks: int
) -> dict[str, str]:
    """Returns the environment of a replica's process, which sees its own GPUs alone.

    Args:
        environment: of the server.
        index: the replica's number.
        n_replicas: all of them.
        n_ranks: GPUs of each replica.
    """
    visible = environment.get(_GPUS)
    gpus = [str(gpu) for gpu in range(n_replicas * n_ranks)]
    if visible is not None:
        gpus = [gpu.strip() for gpu in visible.split(",")]
    of_replica = ",".join(gpus[index * n_ranks : (index + 1) * n_ranks])
    return {**environment, _GPUS: of_replica}


def check_cache_folder(cache_dir: str | None, n_replicas: int) -> None:
    """Refuses a folder with pages that no replica would read: nothing would drop or count them.

    Args:
        cache_dir: the folder; None: there is none.
        n_replicas: that use it.

    Raises:
        ConfigError: it has other folders or files than those of the replicas.
    """
    folder = Path(cache_dir or "").expanduser()
    if cache_dir is None or not folder.is_dir():
        return
    known = {f"replica-{index}" for index in range(n_replicas)}
    known.add("lost+found")  # of a volume, whose root the folder may be
    if others := sorted(path.name for path in folder.iterdir() if path.name not in known):
        raise ConfigError(
            f"cache_dir {cache_dir} has {shortened(others[0])}, which none of {n_replicas} replicas uses: another "
            "number of replicas, or another program, has left it; remove it, or give another folder"
        )


def _check_endpoints(events: KVEventsConfig, n_replicas: int) -> None:
    bases = [base for base in (events.endpoint, events.replay_endpoint) if base is not None]
    # Two endpoints of one machine may be the same if their ports or paths are.
    taken = [_endpoint(base, index).rpartition(":")[2] for base in bases for index in range(n_replicas)]
    if len(set(taken)) < len(taken):
        raise ConfigError(
            f"endpoint {events.endpoint} and replay_endpoint {events.replay_endpoint} are too close for "
            f"{n_replicas} replicas, each of which adds its number to the ports; give ports that are at least "
            f"{n_replicas} apart"
        )


def _endpoint(base: str, index: int) -> str:
    """Returns the endpoint of a replica: as in vLLM its number is added to the port, or put behind a path."""
    parts = re.fullmatch(r"(tcp://.*:)([0-9]+)", base)
    return f"{parts[1]}{int(parts[2]) + index}" if parts else f"{base}_dp{index}"
