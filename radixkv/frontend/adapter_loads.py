"""Loads and unloads the adapters of a server: in all runtimes, and again in one that was started again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from radixkv.checkpoints.adapters import FILE_NAMES
from radixkv.errors import InvalidRequest, RequestError, RuntimeDied, UnsupportedFeature, shortened
from radixkv.frontend.http.errors import RuntimeRestarting
from radixkv.frontend.http.open_requests import OpenRequests
from radixkv.frontend.metrics.log import log_line
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.adapter_names import AdapterNames, Load
from radixkv.wire.adapter_messages import ServedAdapter


class AdapterLoads:
    """Keeps the runtimes' adapters the same, one change at a time, and tells the served model of them.

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
        self._names = AdapterNames(served_model.ready.adapters)
        self._leaving: list[Load] = []
        """Loads without a name that are not released yet."""

    @property
    def paths(self) -> dict[str, str]:
        """The folders of the adapters, by their names."""
        return {load.adapter.name: load.adapter.path for load in self._names}

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
        async with self._lock:
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
            self._names.give(Load(load, adapter))
            self._served_model.add_adapter(adapter)
            if before is not None:
                self._leave(before)

    async def unload(self, name: str) -> None:
        """Lets no new request have an adapter, and frees it when its requests have ended.

        Raises:
            ModelNotFound: no adapter has this name.
        """
        self._check_served()
        async with self._lock:
            self._forget(name)

    async def resume(self, runtime: RuntimeClient) -> None:
        """Loads what the server has in a runtime that was started again without it, then lets it take requests.

        An adapter whose files have changed is not served any more, because its name means the bytes of its load.
        """
        async with self._lock:  # a load meanwhile would skip this runtime
            for load, adapter in list(self._names):
                try:
                    found = await runtime.load_adapter(load, adapter.name, adapter.path, is_restarted=True)
                    if found == adapter:
                        continue
                    reason = f"the files in {adapter.path} are others than those that were loaded"
                except (RuntimeDied, RuntimeRestarting):
                    return  # it died again, which the supervisor notices
                except RequestError as error:
                    reason = str(error)
                log_line(f"adapter {adapter.name!r} is not served any more: {reason}; load it again")
                runtime.unload_adapter(load, is_released=True, is_restarted=True)
                self._forget(adapter.name)
            runtime.resume()

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

    def _forget(self, name: str) -> None:
        """Lets no new request find an adapter. Raises ``ModelNotFound`` if there is none of this name."""
        load = self._names.take(name)
        self._served_model.remove_adapter(name)
        self._leave(load)

    def _leave(self, load: Load) -> None:
        """Releases an adapter that has no name any more when the requests that may have found it have ended."""
        self._leaving.append(load)
        self._unload(load.id, is_released=False)
        self.requests.after_these(partial(self._release, load))

    def _release(self, load: Load) -> None:
        self._leaving.remove(load)
        self._unload(load.id, is_released=True)
        if all(one.adapter.digest != load.adapter.digest for one in self._leaving):
            self._served_model.forget_adapter(load.adapter.digest)

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
