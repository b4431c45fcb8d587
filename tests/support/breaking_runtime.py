"""The runtime process with a decoder that fails, hangs or dies when it computes certain pairs of tokens.

At SIGUSR1 it writes the names of its threads to ``runtime_threads.json`` in the folder of temporary files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixkv.errors import DeviceLost
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.process import main
from radixkv.runtime.step.plan import StepPlan

_BREAKS = 3000
NO_MEMORY = (_BREAKS, 3001)
"""Every step with this pair runs out of memory."""
NO_MEMORY_ONCE = (_BREAKS, 3002)
"""The first step with this pair runs out of memory."""
NOT_FINITE_ONCE = (_BREAKS, 3003)
"""The hidden state of the pair's second token is NaN, the first time."""
HANGS = (_BREAKS, 3004)
DIES = (_BREAKS, 3005)
SLOW = (_BREAKS, 3006)
"""Every step with this pair takes a second longer."""
LOST = (_BREAKS, 3007)
"""The step with this pair fails, and from then on the device is lost."""

Pair = tuple[int, int]


class BreakingDecoder:
    """Wraps the real decoder and breaks it for the pairs above."""

    def __init__(self) -> None:
        self._decode = Decoder.__call__
        self._launch = CpuExecutor.launch
        self._seen: set[Pair] = set()
        self._is_lost = False

    def install(self) -> None:
        Decoder.__call__ = lambda decoder, *step: self.decode(decoder, *step)
        CpuExecutor.launch = lambda executor, plan: self.launch(executor, plan)

    def launch(self, executor: CpuExecutor, plan: StepPlan) -> Any:
        if self._is_lost:
            raise DeviceLost("the device does not respond")
        return self._launch(executor, plan)

    def decode(self, decoder: Decoder, inputs: TokenInputs, *step: Any) -> Tensor:
        pairs = _pairs(inputs.ids.tolist(), inputs.positions.tolist())
        if NO_MEMORY in pairs or (NO_MEMORY_ONCE in pairs and self._is_first(NO_MEMORY_ONCE)):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 GB")
        if HANGS in pairs:
            time.sleep(3600)
        if DIES in pairs:
            os.kill(os.getpid(), signal.SIGSEGV)
        if LOST in pairs:
            self._is_lost = True
            raise RuntimeError("the device does not respond")
        if SLOW in pairs:
            time.sleep(1)
        states = self._decode(decoder, inputs, *step)
        if NOT_FINITE_ONCE in pairs and self._is_first(NOT_FINITE_ONCE):
            states[pairs[NOT_FINITE_ONCE]] = torch.nan
        return states

    def _is_first(self, pair: Pair) -> bool:
        is_first = pair not in self._seen
        self._seen.add(pair)
        return is_first


def _pairs(ids: list[int], positions: list[int]) -> dict[Pair, int]:
    """Returns the pairs above that a step has, with the index of their second token. Outputs hardly have them."""
    indices = range(1, len(ids))
    return {
        (ids[i - 1], ids[i]): i for i in indices if ids[i - 1] == _BREAKS and positions[i] == positions[i - 1] + 1
    }


def write_threads(path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(sorted(thread.name for thread in threading.enumerate())))
    os.replace(partial, path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: write_threads(Path(tempfile.gettempdir(), "runtime_threads.json")))
    BreakingDecoder().install()
    sys.exit(main())
