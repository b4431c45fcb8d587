"""An adapter's matrices as tensors."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.checkpoints.adapters.folder import StoredMatrix

_DTYPES = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


def adapter_pair(folder: AdapterFolder, module: str) -> tuple[Tensor, Tensor]:
    """Returns A [rank, in] and B [out, rank] of a module as stored, in float32, float16 or bfloat16 on the CPU.

    They share the folder's memory and must not be changed. Cost: no copy, but of a matrix at an odd offset.

    Args:
        folder: the adapter.
        module: one of ``folder.modules``.
    """
    a, b = folder.stored(module)
    return _tensor(a), _tensor(b)


def _tensor(matrix: StoredMatrix) -> Tensor:
    # Bytes first: a matrix may begin anywhere in the file, which only a copy aligns.
    values = torch.frombuffer(matrix.content, dtype=torch.uint8)
    dtype = _DTYPES[matrix.dtype]
    aligned = values if values.data_ptr() % dtype.itemsize == 0 else values.clone()
    return aligned.view(dtype).view(matrix.shape)
