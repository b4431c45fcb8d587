"""Loads adapters in threads beside steps, and frees them when nothing uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from radixkv.errors import CheckpointError, InvalidRequest, RequestError, shortened
from radixkv.processes.nice_threads import start_nice_thread
from radixkv.runtime.adapters.registry import AdapterRegistry
from radixkv.runtime.adapters.slots import AdapterSlots
from radixkv.runtime.finished import Finished
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.step.adapters import DeviceAdapters, ReadAdapter
from radixkv.tree.marks import Marks
from radixkv.wire.adapter_messages import (
    AdapterCommand,
    AdapterLoaded,
    LoadAdapter,
    ServedAdapter,
    UnloadAdapter,
)
from radixkv.wire.messages import Failed, FromRuntime
from radixkv.wire.stats import AdapterStats


@dataclass(frozen=True)
class _Read:
    """What a thread has made of a message."""

    message: LoadAdapter
    outcome: ReadAdapter | RequestError


@dataclass
class _Loading:
    """An adapter that a thread reads."""

    name: str
    thread: threading.Thread
    is_unloaded: bool = False
    """Whether nobody wants it any more."""


class LoadableAdapters(Adapters):
    """The adapters of a device, to which threads add others.

    A thread reads and prepares an adapter; the turn after that lets requests ask for it, which takes microseconds.

    Args:
        device: has the weights.
        adapters: those of the start.
        max_adapters: most adapters that are loaded at once; None: any number.
        slots: of the device, for which the scheduler's requests wait; None: steps can have all adapters.
        marks: the tree's, which get those of activated LoRAs.
        is_default: whether no setting gives ``max_adapters``, which errors then say.

    Raises:
        CheckpointError: two activated LoRAs of the start have the same mark.
    """

    def __init__(
        self,
        device: DeviceAdapters,
        adapters: Sequence[ServedAdapter] = (),
        max_adapters: int | None = None,
        *,
        slots: AdapterSlots | None = None,
        marks: Marks,
        is_default: bool = False,
    ) -> None:
        super().__init__()
        self.served = tuple(adapters)
        self.marks = marks
        """The marks of activated LoRAs, which the tree's keys have."""
        for adapter in adapters:
            self._mark(adapter)
        self._device = device
        self._slots = slots
        self._registry = AdapterRegistry(adapters, max_adapters, is_default=is_default)
        self._read: Finished[_Read] = Finished()
        self._loading: dict[str, _Loading] = {}
        """The adapters that are read, by the ids of their loads."""
        self._names = {adapter.digest: adapter.name for adapter in reversed(adapters)}
        """Of all that were ever loaded: pages outlive their adapter, and are invalidated and named by events later.

        It costs about 200 bytes for each, as its mark does, and an invalidation for all adapters looks its prefix
        up with each.
        """
        self.names = self._names

    @property
    def is_busy(self) -> bool:
        """See ``Adapters.is_busy``."""
        has_turns = self._slots is not None and self._slots.is_busy
        return bool(self._loading or self._registry.retired) or has_turns

    def has(self, digest: str) -> bool:
        """See ``Adapters.has``."""
        return self._registry.has(digest)

    def receive(self, message: AdapterCommand) -> list[FromRuntime]:
        """See ``Adapters.receive``."""
        match message:
            case LoadAdapter():
                try:
                    self._begin(message)
                except RequestError as error:
                    return [_failed(message, error)]
            case UnloadAdapter():
                self._unload(message)
        return []

    def n_waiting(self, sender: str | None = None) -> int:
        """See ``Adapters.n_waiting``. O(adapters), for a sender O(requests that wait for slots)."""
        return 0 if self._slots is None else self._slots.queue.n_in_line(sender)

    def advance(self, is_used: Callable[[str], bool]) -> list[FromRuntime]:
        """See ``Adapters.advance``."""
        messages = [self._end(one) for one in self._read.take()]
        if self._slots is not None:
            self._slots.advance()
        for digest in self._registry.free(partial(self._is_needed, is_used)):
            if self._slots is not None:
                self._slots.remove(digest)
            self._device.remove(digest)
            self.marks.unload(digest)
            self.on_freed(digest)
        return messages

    def descriptors(self) -> list[int]:
        """See ``Adapters.descriptors``."""
        return [self._read.fileno()] if self._slots is None else [self._read.fileno(), self._slots.fileno()]

    def stats(self) -> AdapterStats:
        """See ``Adapters.stats``."""
        slots, sizes = self._slots, self._device.sizes
        n_bytes, n_unloaded = sum(sizes.values()), len(sizes.keys() - self._registry.named_digests)
        if slots is None:
            return AdapterStats(len(self._registry.names), n_bytes, n_unloaded=n_unloaded)
        return AdapterStats(
            len(self._registry.names),
            n_bytes,
            n_unloaded=n_unloaded,
            n_in_slots=slots.queue.n_adapters,
            slot_loads_total=slots.n_loads,
            n_waiting=self.n_waiting(),
        )

    def close(self) -> None:
        """See ``Adapters.close``."""
        for loading in self._loading.values():
            loading.thread.join()
        if self._slots is not None:
            self._slots.close()
        for read in self._read.take():
            if not isinstance(read.outcome, RequestError):
                read.outcome.discard()
        self._read.close()

    def _begin(self, message: LoadAdapter) -> None:
        """Starts the thread that reads an adapter. Raises ``RequestError`` if it cannot be loaded."""
        if message.id in self._loading:
            raise InvalidRequest(f"there is a load {shortened(message.id)} already; give each its own id")
        coming = [one.name for one in self._loading.values() if not one.is_unloaded]
        self._registry.check(message.id, message.name, coming)
        try:
            thread = start_nice_thread(partial(self._read_folder, message))
        except RuntimeError as error:  # Python's, where the system starts no more threads
            raise RequestError(
                f"adapter {shortened(message.name)} cannot be loaded now: {error}; load it again later"
            ) from error
        self._loading[message.id] = _Loading(message.name, thread)

    def _unload(self, message: UnloadAdapter) -> None:
        if (loading := self._loading.get(message.load)) is not None:
            loading.is_unloaded = True
        elif message.is_released:
            self._registry.release(message.load)
        else:
            self._registry.drop_name(message.load)

    def _read_folder(self, message: LoadAdapter) -> None:
        outcome: ReadAdapter | RequestError
        try:
            outcome = self._device.read(message.name, message.path)
        except CheckpointError as error:
            outcome = InvalidRequest(str(error), param="lora_path")
        except Exception as error:  # a client waits for the answer, whatever has failed
            outcome = RequestError(f"adapter {shortened(message.name)}: {type(error).__name__}: {error}")
        self._read.add(_Read(message, outcome))

    def _end(self, read: _Read) -> FromRuntime:
        """Lets requests ask for an adapter that a thread has read; returns the answer."""
        message, outcome = read.message, read.outcome
        loading = self._loading.pop(message.id)
        loading.thread.join()
        if isinstance(outcome, RequestError):
            return _failed(message, outcome)
        if loading.is_unloaded:
            outcome.discard()
            return _failed(message, RequestError(f"adapter {shortened(message.name)} was unloaded meanwhile"))
        adapter = ServedAdapter(message.name, message.path, outcome.digest, outcome.invocation_tokens)
        try:
            self._mark(adapter)
        except CheckpointError as error:
            outcome.discard()
            return _failed(message, InvalidRequest(str(error), param="lora_path"))
        if self._registry.add(message.id, adapter):
            outcome.put()
        else:
            outcome.discard()
        self._names[adapter.digest] = adapter.name
        return AdapterLoaded(message.id, adapter)

    def _is_needed(self, is_used: Callable[[str], bool], digest: str) -> bool:
        return is_used(digest) or (self._slots is not None and self._slots.is_coming(digest))

    def _mark(self, adapter: ServedAdapter) -> None:
        """Gives an activated LoRA its mark. Raises ``CheckpointError`` if another one has it."""
        if adapter.invocation_tokens is not None:
            self.marks.add(adapter.digest, adapter.invocation_tokens)


def _failed(message: LoadAdapter, error: RequestError) -> Failed:
    return Failed(message.id, error.code, str(error), error.param)
