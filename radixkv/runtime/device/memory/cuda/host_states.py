"""Host memory for states of recurrent layers on a GPU, with the copies in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.runtime.device.memory.cuda.copy_pace import CopyPace
from radixkv.runtime.device.memory.cuda.copy_stream import CopyStream
from radixkv.runtime.device.memory.cuda.driver import CudaDriver
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.pinned_memory import PinnedMemory
from radixkv.runtime.device.memory.state_slots import StateSlots


class CudaHostStates:
    """A ``copy_threads.HostStates`` in pinned memory.

    On the GPU a state is two parts of each layer, which the copy engine moves by one call. Nothing orders a copy
    against the steps: those that have computed the state are done, and none that is queued reads what is loaded.

    Args:
        states: those of the device.
        slots: where the memory has what.
        memory: begins with all slots. They are used once all of them are pinned.
        driver: copies between the GPU and the slots.
        pace: how fast copies go beside steps.
        load_stream, store_stream: for the copies of each direction.
    """

    def __init__(
        self,
        states: CudaStates,
        slots: StateSlots,
        memory: PinnedMemory,
        driver: CudaDriver,
        pace: CopyPace,
        load_stream: CopyStream,
        store_stream: CopyStream,
    ) -> None:
        self.n_slots = slots.n_slots
        self._states, self._slots, self._memory = states, slots, memory
        self._driver, self._pace = driver, pace
        self._load_stream, self._store_stream = load_stream, store_stream

    def buffers(self, slot: int) -> list[memoryview]:
        """See ``HostStates.buffers``. O(parts)."""
        return self._slots.buffers(self._memory.view, slot)

    def load(self, states: Sequence[tuple[int, int]]) -> None:
        """See ``HostStates.load``. Raises ``DeviceError`` or torch's errors."""
        self._copy(states, self._load_stream, is_load=True)
        for slot, tree_slot in states:
            self._states.set_position(tree_slot, self._slots.position(self._memory.view, slot))

    def store(self, states: Sequence[tuple[int, int]]) -> None:
        """See ``HostStates.store``. Raises ``DeviceError`` or torch's errors."""
        self._copy(states, self._store_stream, is_load=False)
        for slot, tree_slot in states:
            self._slots.set_position(self._memory.view, slot, self._states.position(tree_slot))

    def _copy(self, states: Sequence[tuple[int, int]], copies: CopyStream, *, is_load: bool) -> None:
        """Copies states between host and GPU, and waits."""
        copies.wait()  # the driver needs a thread that has used the device
        try:
            for slot, tree_slot in states:
                on_device, n_bytes = self._states.parts(tree_slot)
                first = self._memory.address + self._slots.first_byte(slot)
                on_host = first + np.cumsum(n_bytes) - n_bytes
                destinations, sources = (on_device, on_host) if is_load else (on_host, on_device)
                self._pace.wait(self._states.n_bytes)
                self._driver.copy(destinations, sources, n_bytes, copies.stream)
        finally:
            copies.wait()
