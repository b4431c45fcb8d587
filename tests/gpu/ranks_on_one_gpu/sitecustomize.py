"""Lets tests of two ranks run on a machine with one GPU, which executes the ranks' kernels in turns.

Each Python process with this folder on its path sees two GPUs, which are the same one. So all tests of ranks run as
they do on two, but for the speed of exchanges: a kernel that waits for the other rank's holds the GPU for a time
slice. A test takes some 15 s::

    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 PYTHONPATH=tests/gpu/ranks_on_one_gpu:tests:tests/gpu:. \\
        pytest tests/gpu/test_gpu_lora_ranks.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

N_GPUS = 2


class OneGpuTwice(MetaPathFinder):
    """Changes ``torch.cuda`` where it is imported, so that no process imports torch because of this module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns torch's own module with a loader that changes it; None for all others."""
        if name != "torch.cuda":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            show_twice(module)

        loader.exec_module = exec_module
        return spec


def show_twice(cuda: Any) -> None:
    """Changes what callers outside torch see of the number of GPUs, and makes each number the one GPU."""
    count, set_device, name_of = cuda.device_count, cuda.set_device, cuda.get_device_name

    def device_count() -> int:
        caller: str = sys._getframe(1).f_globals["__name__"]
        return count() if caller.startswith("torch") else N_GPUS

    cuda.device_count = device_count
    cuda.set_device = lambda device: set_device(0)
    cuda.get_device_name = lambda device=None: name_of(0)
    cuda.can_device_access_peer = lambda one, other: True


sys.meta_path.insert(0, OneGpuTwice())
