"""Loads and unloads the adapters of a server: in all runtimes, and again in one that was started again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from radixkv.checkpoints.adapters import FILE_NAMES
from radixkv.errors import InvalidRequest, RequestError, RuntimeDied, UnsupportedFeature, shortened
from radixkv.frontend.http.errors import RuntimeRestarting, RuntimeSilent
from radixkv.frontend.http.open_requests import OpenRequests
from radixkv.frontend.metrics.log import log_line
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.adapter_names import AdapterNames, LoadedAdapter
from radixkv.wire.adapter_messages import ServedAdapter

_RETRY_PAUSES_S = (1.0, 2.0)
"""Pauses before a runtime that was started again reads the adapters once more that it could not load."""


class AdapterLoads:
    """Keeps the runtimes' adapters the same, and tells the served model of them.

    Loads run one at a time, and none runs while a runtime that was started again gets its adapters. An unload waits
    for a load of the same name alone.

    A request finds its adapter by the name, and asks the runtime for the digest, perhaps much later. So a new
    adapter is loaded in all runtimes before the name means it, and the one before is released in none of them until
    the HTTP requests that may have found it have ended.

    Args:
        runtimes: the clients of the runtimes.
        served_model: has the adapters' names.
        folder: the one inside which clients may have adapters loaded; None: nowhere.
        are_served: whether the runtimes have adapters at all.
    """

    def __init__(
        self,
        runtimes: Sequence[RuntimeClient],
        served_model: ServedModel,
        *,
        folder: Path | None,
        are_served: bool,
    ) -> None:
        self.requests = OpenRequests()
        """The HTTP requests that may have found an adapter by its name."""
        self._runtimes = runtimes
        self._served_model = served_model
        self._folder = folder
        self._are_served = are_served
        self._lock = asyncio.Lock()
        self._name_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each name that is loaded or unloaded."""
        self._names = AdapterNames(served_model.ready.adapters)
        self._unnamed: list[LoadedAdapter] = []
        """Adapters without a name that are not released yet."""

    @property
    def paths(self) -> dict[str, str]:
        """The folders of the adapters, by their names."""
        return {loaded.adapter.name: loaded.adapter.path for loaded in self._names}

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Loads an adapter in all runtimes that are up; requests may then ask for it.

        If one of them cannot load it, it is loaded in none, and the adapter that has the name keeps it.

        Args:
            name: by which requests ask for it.
            path: its folder, absolute or in that of ``--lora-dir``.
            in_place: whether it may replace the adapter of this name.

        Raises:
            InvalidRequest: the server may not load it, it cannot be served, or the name is taken.
            RequestError: no runtime is up, or one does not answer.
        """
        self._check_served()
        if name in self._served_model.names:
            raise InvalidRequest(
                f"lora_name is {shortened(name)}, which is the model's; choose another name for the adapter",
                param="lora_name",
            )
        resolved = await asyncio.to_thread(self._resolved, path)
        async with self._lock_of(name), self._lock:
            before = self._names.check(name, in_place=in_place)
            load = uuid.uuid4().hex
            try:
                replies = await asyncio.gather(
                    *(runtime.load_adapter(load, name, str(resolved)) for runtime in self._runtimes),
                    return_exceptions=True,
                )
                adapter = _agreed(replies, path)
            except BaseException:
                self._unload(load, is_released=True)  # also where it is read yet, and this waits no longer for it
                raise
            self._names.set(LoadedAdapter(load, adapter))
            self._served_model.add_adapter(adapter)
            if before is not None:
                self._retire(before)

    async def unload(self, name: str) -> None:
        """Lets no new request have an adapter, and frees it when its requests have ended.

        Waits for a load of the same name, if one is under way.

        Raises:
            ModelNotFound: no adapter has this name.
        """
        self._check_served()
        async with self._lock_of(name):
            self._remove(name)

    async def resume(self, runtime: RuntimeClient) -> bool:
        """Loads what the server has in a runtime that was started again without it, then lets it take requests.

        An adapter that cannot be loaded, also after ``_RETRY_PAUSES_S``, is not served any more, nor is one whose
        files have changed, because its name means the bytes of its load.

        Returns:
            Whether it takes requests; if not, it has died again.
        """
        async with self._lock:  # a load meanwhile would skip this runtime
            adapters = list(self._names)
            try:
                errors = await self._load_again(runtime, adapters)
                for pause_s in _RETRY_PAUSES_S:
                    answered = [one for one, error in errors.items() if not isinstance(error, RuntimeSilent)]
                    if answered:
                        await asyncio.sleep(pause_s)
                        for one in answered:
                            del errors[one]
                        errors |= await self._load_again(runtime, answered)
            except (RuntimeDied, RuntimeRestarting):
                return False
            for loaded, error in errors.items():
                name = loaded.adapter.name
                if self._names.get(name) == loaded:
                    log_line(f"adapter {name!r} is not served any more: {error}; load it again")
                    self._remove(name, str(error))
            for loaded in adapters:
                if self._names.get(loaded.adapter.name) != loaded:  # it may have been unloaded meanwhile
                    runtime.unload_adapter(loaded.load, is_released=True, is_restarted=True)
            runtime.resume()
            return True

    async def _load_again(
        self, runtime: RuntimeClient, adapters: Sequence[LoadedAdapter]
    ) -> dict[LoadedAdapter, RequestError]:
        """Loads adapters in a runtime that was started again; returns those that it has not got, and why.

        Raises:
            RuntimeDied, RuntimeRestarting: the runtime is gone again.
        """
        errors: dict[LoadedAdapter, RequestError] = {}
        for loaded in adapters:
            load, adapter = loaded
            try:
                found = await runtime.load_adapter(load, adapter.name, adapter.path, is_restarted=True)
                if found == adapter:
                    continue
                errors[loaded] = InvalidRequest(
                    f"the files in {adapter.path} are others than those that were loaded"
                )
            except (RuntimeDied, RuntimeRestarting):
                raise
            except RequestError as error:
                errors[loaded] = error
            runtime.unload_adapter(load, is_released=True, is_restarted=True)
        return errors

    def _lock_of(self, name: str) -> asyncio.Lock:
        """Returns the lock of a name, which lasts as long as somebody has it."""
        return self._name_locks.setdefault(name, asyncio.Lock())

    def _check_served(self) -> None:
        if not self._are_served:
            raise UnsupportedFeature(
                "this server has no adapters; start it with --enable-lora, and with --lora-dir DIR to load them"
            )

    def _resolved(self, path: str) -> Path:
        """Returns the folder that a path leads to, without links.

        Raises ``InvalidRequest`` unless it and its files are in the folder of ``--lora-dir``.
        """
        if self._folder is None:
            raise UnsupportedFeature(
                "this server loads no adapters for clients; start it with --lora-dir DIR, which has them",
                param="lora_path",
            )
        try:
            root = self._folder.resolve()
            folder = (root / path).resolve()
            are_inside = all(
                one.resolve().is_relative_to(root) for one in (folder, *(folder / name for name in FILE_NAMES))
            )
        except (OSError, ValueError, RuntimeError):  # a loop of links, or a character that no path has
            are_inside = False
        if not are_inside:
            raise InvalidRequest(
                f"lora_path {shortened(path)} is not inside the folder of --lora-dir, or leads out of it; put the "
                "adapter there",
                param="lora_path",
            )
        return folder

    def _remove(self, name: str, reason: str = "") -> None:
        """Lets no new request find an adapter, and tells them the reason. Raises ``ModelNotFound`` without one."""
        removed = self._names.remove(name)
        self._served_model.remove_adapter(name, reason)
        self._retire(removed)

    def _retire(self, loaded: LoadedAdapter) -> None:
        """Releases an adapter that has no name any more when the requests that may have found it have ended."""
        self._unnamed.append(loaded)
        self._unload(loaded.load, is_released=False)
        self.requests.after_open(partial(self._release, loaded))

    def _release(self, loaded: LoadedAdapter) -> None:
        self._unnamed.remove(loaded)
        self._unload(loaded.load, is_released=True)
        if all(one.adapter.digest != loaded.adapter.digest for one in self._unnamed):
            self._served_model.forget_adapter(loaded.adapter.digest)

    def _unload(self, load: str, *, is_released: bool) -> None:
        for runtime in self._runtimes:
            runtime.unload_adapter(load, is_released=is_released)


def _agreed(replies: Sequence[ServedAdapter | BaseException], path: str) -> ServedAdapter:
    """Returns the adapter that all runtimes have loaded that are up.

    Raises the error of one that has not loaded it, or ``InvalidRequest`` if they have read different files.
    """
    adapters = [one for one in replies if isinstance(one, ServedAdapter)]
    for one in replies:
        if isinstance(one, BaseException) and not (adapters and isinstance(one, RuntimeDied | RuntimeRestarting)):
            raise one
    if len(set(adapters)) > 1:
        raise InvalidRequest(
            f"the files in {shortened(path)} have changed while they were read; load the adapter again",
            param="lora_path",
        )
    return adapters[0]
