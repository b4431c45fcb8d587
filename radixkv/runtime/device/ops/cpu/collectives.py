"""What the ranks of a model on the CPUs of one host compute together, over gloo."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from radixkv.errors import DeviceError
from radixkv.runtime.device.collectives import COLLECTIVE_TIMEOUT_S


class GlooCollectives:
    """The ``SummingCollectives`` of ranks on the CPUs of one host.

    Gloo's own sum adds in an order that depends on the size of the tensor, so tensors are gathered and then added.
    That makes a row's bits independent of the rows beside it. Parts in bfloat16 are added in float32.

    Args:
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None

    def connect(self, store: Path, timeout_s: float) -> None:
        """Waits until all ranks do this; must come before all else. Nobody needs the store afterwards.

        Args:
            store: file by which the ranks find each other, in a folder that no other user can read; new for each
                group.
            timeout_s: how long a rank waits for the others here.

        Raises:
            DeviceError: a rank did not come in time. The other methods raise it, too, and at once where a rank has
                ended.
        """
        # A group of its own, not the process's default one, which the user of ``LLM`` may have; torch types none.
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        files: Any = distributed.FileStore(str(store), self.size)  # type: ignore[attr-defined]
        try:
            self._group = gloo(files, self.rank, self.size, options)
        except RuntimeError as error:
            raise DeviceError(f"the ranks of the model do not connect: {error}") from error
        self._group.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self.sum(torch.zeros(1))  # the others may still read the store until they come here

    def sum(self, partial: Tensor) -> Tensor:
        """See ``SummingCollectives.sum``."""
        parts = [torch.empty_like(partial) for _ in range(self.size)]
        self._wait(self._group.allgather([parts], [partial]))
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        return total.to(partial.dtype)

    def broadcast(self, tensor: Tensor) -> None:
        """See ``Collectives.broadcast``."""
        options: Any = distributed.BroadcastOptions()
        options.rootRank = 0
        self._wait(self._group.broadcast([tensor], options))

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise DeviceError("another rank of the model has ended, or does not respond in time") from error
