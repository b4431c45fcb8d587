"""An adapter's matrices as tensors, wherever they are in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices
from support.adapters import Sizes, adapter_tensors, layer_modules, write_adapter

_Q, _V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"


def _check(path: Path) -> None:
    """Compares all matrices with those that safetensors reads, to the bit."""
    folder = AdapterFolder.open(path, max_rank=8)
    stored = load_file(path / "adapter_model.safetensors")
    assert folder.modules
    for module in folder.modules:
        for half, matrix in zip("AB", AdapterMatrices(folder).pair(module), strict=True):
            expected = stored[f"base_model.model.{module}.lora_{half}.weight"]
            assert matrix.dtype == expected.dtype
            assert torch.equal(matrix.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_matrices_are_those_of_the_file(tmp_path: Path, dtype: str) -> None:
    _check(write_adapter(tmp_path, dtype=dtype))


def test_a_matrix_may_begin_at_any_offset(tmp_path: Path) -> None:
    """After one with an odd number of float16."""
    first = adapter_tensors({_Q: Sizes(1, 3, 5)}, "F16")
    second = adapter_tensors({_V: Sizes(1, 4, 2)}, "F32")
    a, b = sorted(first)
    _check(write_adapter(tmp_path, {}, extra={a: first[a]} | second | {b: first[b]}, r=1))


def test_matrices_are_not_copied(tmp_path: Path) -> None:
    folder = AdapterFolder.open(write_adapter(tmp_path, layer_modules("self_attn.q_proj")), max_rank=8)
    one, other = (AdapterMatrices(folder).pair(_Q) for _ in range(2))
    assert [matrix.data_ptr() for matrix in one] == [matrix.data_ptr() for matrix in other]
