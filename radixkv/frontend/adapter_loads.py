"""Loads and unloads the adapters of a server: in all runtimes, and again in one that was started again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path

from radixkv.checkpoints.adapters import FILE_NAMES
from radixkv.errors import InvalidRequest, RequestError, RuntimeDied, UnsupportedFeature, shortened
from radixkv.frontend.http.errors import ModelNotFound, RuntimeRestarting
from radixkv.frontend.metrics.log import log_line
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.served_model import ServedModel
from radixkv.wire.adapter_messages import ServedAdapter


class AdapterLoads:
    """Keeps the runtimes' adapters the same, one change at a time, and tells the served model of them.

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
        self._runtimes = runtimes
        self._served_model = served_model
        self._folder = folder
        self._are_served = are_served
        self._lock = asyncio.Lock()
        self._adapters = {adapter.name: adapter for adapter in served_model.ready.adapters}

    @property
    def paths(self) -> dict[str, str]:
        """The folders of the adapters, by their names."""
        return {name: adapter.path for name, adapter in self._adapters.items()}

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Loads an adapter in all runtimes that are up; requests may then ask for it.

        Args:
            name: by which requests ask for it.
            path: its folder, absolute or in that of ``--lora-dir``.
            in_place: whether it may replace the adapter of this name.

        Raises:
            InvalidRequest: the server may not load it, it cannot be served, or the name is taken.
            RequestError: no runtime is up.
        """
        self._check_served()
        if not name or name in self._served_model.names:
            raise InvalidRequest(
                f"lora_name is {shortened(name)}, which cannot be the name of an adapter; choose one that is not "
                "the model's",
                param="lora_name",
            )
        resolved = await asyncio.to_thread(self._resolved, path)
        async with self._lock:
            replies = await asyncio.gather(
                *(runtime.load_adapter(name, str(resolved), in_place=in_place) for runtime in self._runtimes),
                return_exceptions=True,
            )
            adapters, errors = _parted(replies)
            if len(set(adapters)) == 1 and not errors:
                self._adapters[name] = adapters[0]
                self._served_model.add_adapter(adapters[0])
                return
            if adapters:  # of those before some have replaced theirs, so that none may stay
                self._forget(name)
                await self._unload(name)
            raise (
                errors[0]
                if errors
                else InvalidRequest(
                    f"the files in {shortened(path)} have changed while they were read; load the adapter again",
                    param="lora_path",
                )
            )

    async def unload(self, name: str) -> None:
        """Lets no new request have an adapter, and frees it when its requests have ended.

        Raises:
            ModelNotFound: no adapter has this name.
        """
        self._check_served()
        async with self._lock:
            if name not in self._adapters:
                loaded = ", ".join(map(shortened, self._adapters)) or "none"
                raise ModelNotFound(
                    f"no adapter {shortened(name)} is loaded; give the name of one that is (loaded: {loaded})",
                    param="lora_name",
                )
            self._forget(name)
            await self._unload(name)

    async def resume(self, runtime: RuntimeClient) -> None:
        """Loads what the server has in a runtime that was started again without it, then lets it take requests.

        An adapter whose files have changed is not served any more, because its name means the bytes of its load.
        """
        async with self._lock:  # a load meanwhile would skip this runtime
            for adapter in list(self._adapters.values()):
                try:
                    found = await runtime.load_adapter(
                        adapter.name, adapter.path, in_place=False, is_restarted=True
                    )
                    if found == adapter:
                        continue
                    reason = f"the files in {adapter.path} are others than those that were loaded"
                except (RuntimeDied, RuntimeRestarting):
                    return  # it died again, which the supervisor notices
                except RequestError as error:
                    reason = str(error)
                log_line(f"adapter {adapter.name!r} is not served any more: {reason}; load it again")
                self._forget(adapter.name)
                await self._unload(adapter.name)
                await _settled([runtime.unload_adapter(adapter.name, is_restarted=True)])
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
        self._adapters.pop(name, None)
        self._served_model.remove_adapter(name)

    async def _unload(self, name: str) -> None:
        """Unloads an adapter where it is."""
        await _settled([runtime.unload_adapter(name) for runtime in self._runtimes])


async def _settled(unloads: Sequence[Coroutine[None, None, None]]) -> None:
    """Waits for commands that may find nothing to do, or a runtime that is down."""
    for error in await asyncio.gather(*unloads, return_exceptions=True):
        if isinstance(error, BaseException) and not isinstance(
            error, InvalidRequest | RuntimeDied | RuntimeRestarting
        ):
            raise error


def _parted(
    replies: Sequence[ServedAdapter | BaseException],
) -> tuple[list[ServedAdapter], list[RequestError]]:
    """Returns what runtimes have loaded, and why others have not; the latter without those that are down.

    Raises what is no ``RequestError``, and the reason if all are down.
    """
    adapters = [one for one in replies if isinstance(one, ServedAdapter)]
    errors: list[RequestError] = []
    for one in replies:
        if isinstance(one, RequestError):
            if not (adapters and isinstance(one, RuntimeDied | RuntimeRestarting)):
                errors.append(one)
        elif isinstance(one, BaseException):
            raise one
    return adapters, errors
