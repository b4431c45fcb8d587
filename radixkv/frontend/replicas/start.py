"""Start of the runtime processes of a server, one for each replica."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from radixkv.errors import RadixKVError
from radixkv.frontend.replicas.replica_settings import (
    check_cache_folder,
    engine_of_replica,
    environment_of_replica,
)
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.runtime_process import RuntimeProcess
from radixkv.settings.config import EngineConfig
from radixkv.wire.messages import Ready


class StartCall:
    """Starts the runtime of one replica, at first and again.

    Args:
        engine: the settings of the replica.
        model_folder: has the model.
        tokenizer_folder: has the tokenizer.
        client: is connected to each process.
        index: the replica's number.
        name: what errors and the log call the process.
        environment: the environment variables of the process. None: those of this one.
    """

    def __init__(
        self,
        engine: EngineConfig,
        model_folder: Path,
        tokenizer_folder: Path,
        client: RuntimeClient,
        index: int,
        name: str,
        environment: Mapping[str, str] | None,
    ) -> None:
        self._engine = engine
        self._model_folder = model_folder
        self._tokenizer_folder = tokenizer_folder
        self._client = client
        self._index = index
        self._name = name
        self._environment = environment

    async def __call__(self, *, first_event_number: int = 0, pool_of: Ready | None = None) -> RuntimeProcess:
        """Returns the process once it is ready.

        Args:
            first_event_number: number of the first batch of cache events.
            pool_of: what the process before this one was ready with: another one might measure another pool. None:
                there was none. If not, this one starts without adapters.

        Raises:
            RadixKVError: the process failed.
        """
        engine = self._engine
        if pool_of is not None:
            n_tokens = pool_of.n_pages * pool_of.page_size
            cache = dataclasses.replace(engine.cache, max_total_tokens=n_tokens, kv_cache_memory_bytes=None)
            # The server loads the adapters that it has by then.
            enable_lora = engine.adapters.has_adapters
            adapters = dataclasses.replace(engine.adapters, enable_lora=enable_lora, lora_modules=())
            engine = dataclasses.replace(engine, cache=cache, adapters=adapters)
        return await RuntimeProcess.start(
            engine,
            self._model_folder,
            self._client,
            tokenizer_folder=self._tokenizer_folder,
            first_event_number=first_event_number,
            data_parallel_rank=self._index,
            environment=self._environment,
            name=self._name,
        )


def start_calls(
    engine: EngineConfig, model_folder: Path, tokenizer_folder: Path, clients: Sequence[RuntimeClient]
) -> list[StartCall]:
    """Returns what starts the runtime of each client.

    Args:
        engine: the settings of the server.
        model_folder: has the model.
        tokenizer_folder: has the tokenizer.
        clients: of the runtimes, in their order.

    Raises:
        ConfigError: the settings do not fit so many replicas.
    """
    n_replicas = len(clients)
    if n_replicas == 1:
        return [StartCall(engine, model_folder, tokenizer_folder, clients[0], 0, "the runtime process", None)]
    check_cache_folder(engine.cache.cache_dir, n_replicas)
    n_ranks = engine.model.tensor_parallel_size
    return [
        StartCall(
            engine_of_replica(engine, index, n_replicas),
            model_folder,
            tokenizer_folder,
            client,
            index,
            f"the runtime process of replica {index}",
            environment_of_replica(os.environ, index, n_replicas, n_ranks),
        )
        for index, client in enumerate(clients)
    ]


async def start_all(starts: Sequence[Coroutine[Any, Any, RuntimeProcess]]) -> list[RuntimeProcess]:
    """Starts all runtimes at the same time. If one fails, or if this is cancelled, leaves no process.

    Args:
        starts: returns each runtime when it is ready.

    Raises:
        RadixKVError: a runtime failed, or two are not alike.
    """
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        runtimes = await asyncio.gather(*tasks)
        _check_alike([runtime.ready for runtime in runtimes])
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, RuntimeProcess):
                await result.stop()
        raise
    return runtimes


def _check_alike(all_ready: Sequence[Ready]) -> None:
    """Refuses replicas that differ by more than the pages that their memory holds."""
    first = all_ready[0]
    for index, ready in enumerate(all_ready):
        if msgspec.structs.replace(ready, n_pages=first.n_pages, n_host_slots=first.n_host_slots) != first:
            raise RadixKVError(
                f"replica {index} has other sizes than replica 0: {ready}, not {first}; give them equal GPUs"
            )
