"""The adapters of a device without weights: each folder is a digest, or an error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from radixkv.errors import CheckpointError
from radixkv.runtime.adapters.loading import LoadableAdapters
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

    def read(self, name: str, path: str) -> FakeRead:
        if path not in self.folders:
            raise CheckpointError(f"adapter {name!r}: {path} has no adapter_config.json")
        digest = self.folders[path]
        self.undecided.append(digest)
        return FakeRead(digest, self.sizes, self.undecided, self.invocations.get(digest))

    def remove(self, digest: str) -> None:
        assert digest not in self.launched(), "a launched step would be computed without it"
        del self.sizes[digest]


def fake_adapters(
    *adapters: ServedAdapter, folders: Mapping[str, str] | None = None, max_adapters: int | None = None
) -> LoadableAdapters:
    """Returns adapters of a loop; ``folders`` are those that can be loaded."""
    device = FakeDeviceAdapters(folders or {}, {adapter.digest: N_BYTES for adapter in adapters})
    return LoadableAdapters(device, adapters, max_adapters, marks=Marks())
