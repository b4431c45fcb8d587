"""Decoders over CUDA's operations that are built before their weights have come: nothing is converted too early."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_support import DEVICE, on_kernels
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.weights.open import open_weights
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS
from support.late_tensors import LateTensors
from support.quantized_checkpoints import FORMATS, save_quantized

pytestmark = on_kernels

ALL = CHECKPOINTS | HYBRIDS
ONE_GROUP = {"n_group": 1, "topk_group": 1}
"""Groups of experts are for the CPU only."""


def parts_of(one: object, path: str, seen: dict[int, object]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that an object refers to, with the way to each."""
    if isinstance(one, Tensor):
        yield path, one
        return
    if id(one) in seen or isinstance(one, type):
        return
    seen[id(one)] = one
    parts: Mapping[Any, object] = {}
    match one:
        case dict():
            parts = one
        case list() | tuple():
            parts = dict(enumerate(one))
        case partial():
            parts = {"args": one.args, "keywords": one.keywords}
        case _ if type(one).__module__.startswith("radixkv."):
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            parts = getattr(one, "__dict__", {}) | {name: getattr(one, name, None) for name in slots}
    for name, part in parts.items():
        yield from parts_of(part, f"{path}.{name}", seen)


def decoder_of(checkpoint: Checkpoint, dtype: torch.dtype, *, is_late: bool, **options: Any) -> Decoder:
    device = torch.device(DEVICE)
    with (
        torch.inference_mode(),
        open_weights(checkpoint, load_format="auto", dtype=dtype, device=device, **options) as weights,
    ):
        operations = CudaOperations(weights.config, 128, device)
        if not is_late:
            return Decoder(weights, operations)
        late = LateTensors(weights.source)
        decoder = Decoder(replace(weights, source=late), operations)
        late.load()
        return decoder


def check(folder: Path, dtype: torch.dtype, **options: Any) -> None:
    late, early = (
        dict(parts_of(decoder_of(resolve(str(folder)), dtype, is_late=is_late, **options), "decoder", {}))
        for is_late in (True, False)
    )
    assert len(late) > 10
    assert late.keys() == early.keys()
    for path, tensor in late.items():
        assert tensor.dtype == early[path].dtype, path
        assert torch.equal(_bytes(tensor), _bytes(early[path])), f"{path} was taken before it was loaded"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("kind", ALL)
def test_weights_that_come_late_are_all_in_place(
    kind: str, quantization: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    changes = ALL[kind] | (ONE_GROUP if kind in HYBRIDS else {})
    save_checkpoint(tmp_path / "model", **changes)
    check(tmp_path / "model", dtype, quantization=quantization, products=("fp8",) if quantization else ())


@pytest.mark.parametrize("products", [(), ("fp8", "int4")])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_that_come_late_are_all_in_place(name: str, products: Any, tmp_path: Path) -> None:
    save_quantized(tmp_path, name, **(CHECKPOINTS["gpt-oss"] if name == "mxfp4" else {}))
    check(tmp_path / "quantized", torch.bfloat16, products=products)
