"""The adapters of a device without weights: each folder is a digest, or an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from time import monotonic

from radixkv.errors import CheckpointError
from radixkv.runtime.adapters.loading import LoadableAdapters
from radixkv.runtime.adapters.slots import AdapterSlots
from radixkv.tree.marks import Marks
from radixkv.wire.adapter_messages import ServedAdapter

N_BYTES = 100
"""Of each adapter."""


@dataclass
class FakeRead:
    digest: str
    sizes: dict[str, int]
    undecided: list[str]
    """Digests of what was read, and neither put nor discarded."""
    invocation_tokens: tuple[int, ...] | None = None
    n_bytes: int = N_BYTES

    def put(self) -> None:
        assert self.digest not in self.sizes, "put twice"
        self.undecided.remove(self.digest)
        self.sizes[self.digest] = self.n_bytes

    def discard(self) -> None:
        self.undecided.remove(self.digest)


@dataclass
class FakeCopy:
    digest: str
    device: FakeDeviceAdapters
    is_filled: bool = False

    def fill(self) -> None:
        assert not self.is_filled
        self.is_filled = True

    def put(self) -> None:
        assert self.is_filled
        assert self.digest not in self.device.in_slots, "put twice"
        self.device.in_slots.add(self.digest)
        self.device.n_copied -= 1
        self.device.check_slots()

    def discard(self) -> None:
        self.device.n_copied -= 1


@dataclass
class FakeDeviceAdapters:
    folders: Mapping[str, str] = field(default_factory=dict)
    """The digest of each folder that is an adapter."""
    sizes: dict[str, int] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    """Digests of what was read, and neither put nor discarded."""
    invocations: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The invocation tokens of the digests that are activated LoRAs."""
    launched: Callable[[], Collection[str]] = tuple
    """Returns the digests of the rows of launched steps, which the device may still have to compute."""

    n_slots: int | None = None
    """Adapters that steps can have."""
    in_slots: set[str] = field(default_factory=set)
    n_copied: int = 0
    """Copies that were neither put nor discarded."""

    def read(self, name: str, path: str) -> FakeRead:
        if path not in self.folders:
            raise CheckpointError(f"adapter {name!r}: {path} has no adapter_config.json")
        digest = self.folders[path]
        self.undecided.append(digest)
        return FakeRead(digest, self.sizes, self.undecided, self.invocations.get(digest))

    def remove(self, digest: str) -> None:
        assert digest not in self.launched(), "a launched step would be computed without it"
        assert digest not in self.in_slots
        del self.sizes[digest]

    def copy(self, digest: str) -> FakeCopy:
        assert digest in self.sizes, "what is not loaded cannot be copied"
        assert digest not in self.in_slots, "it has a slot"
        self.n_copied += 1
        assert self.n_copied == 1, "there is one spare slot"
        return FakeCopy(digest, self)

    def withdraw(self, digest: str) -> None:
        assert digest not in self.launched(), "a launched step would be computed without it"
        self.in_slots.remove(digest)

    def check_slots(self) -> None:
        """Checks that the slots suffice, and that all rows of launched steps have theirs."""
        assert self.n_slots is not None
        assert len(self.in_slots) <= self.n_slots
        assert set(self.launched()) - {""} <= self.in_slots


def fake_adapters(
    *adapters: ServedAdapter,
    folders: Mapping[str, str] | None = None,
    max_adapters: int | None = None,
    n_slots: int | None = None,
    clock: Callable[[], float] = monotonic,
) -> LoadableAdapters:
    """Returns adapters of a loop; ``folders`` are those that can be loaded."""
    sizes = {adapter.digest: N_BYTES for adapter in adapters}
    device = FakeDeviceAdapters(folders or {}, sizes, n_slots=n_slots)
    slots = None if n_slots is None else AdapterSlots(device, n_slots, clock)
    return LoadableAdapters(device, adapters, max_adapters, slots=slots, marks=Marks())
