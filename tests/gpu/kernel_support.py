"""Shared support for tests of the Triton kernels.

Without a CUDA device `make test-nightly` runs them in Triton's interpreter, with TRITON_INTERPRET=1 and without the
conftest that skips them. The interpreter needs NumPy below 2.4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="the kernels need Triton, which comes with the extra 'cuda'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RELATIVE = {torch.bfloat16: 2.0**-7 if DEVICE == "cuda" else 2.0**-5, torch.float16: 2.0**-10, torch.float32: 1e-5}
"""Two units in the last place; for float32 the effect of summation order. The interpreter truncates to bfloat16."""

torch.manual_seed(0)

on_kernels = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton.knobs.runtime.interpret, reason="needs a CUDA device, or TRITON_INTERPRET=1"
    ),
]
on_device_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Returns random normal values."""
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def integers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns NaN, or an integer that no test expects, so that unwritten elements show up."""
    return torch.full(
        shape, -77 if dtype in (torch.int32, torch.int64) else float("nan"), dtype=dtype, device=DEVICE
    )


def among_layers(cache: Tensor, n_layers: int = 3) -> Tensor:
    """Copies K or V, [pages, page_size, kv_heads, head_dim], into a tensor with layers of NaN beside it."""
    pages, page_size, *token = cache.shape
    layers = torch.full((pages, page_size, n_layers, *token), float("nan"), device=cache.device).to(cache.dtype)
    own = layers[:, :, 1]
    own.copy_(cache)
    return own


def check_close(found: Tensor, expected: Tensor, *, slack: float = 0.1, n_roundings: int = 1) -> None:
    """Checks that each value is within two units of ``found``'s dtype of a float32 or float64 oracle.

    Args:
        found: the kernel's output.
        expected: the oracle's.
        n_roundings: how often the kernel rounds to the dtype. Each time, a value between two others may be rounded
            to another one than in the oracle, which sums in another order.
        slack: additional tolerance, in units of a value of typical size: sums of rounded values can cancel.
    """
    relative = n_roundings * RELATIVE[found.dtype]
    typical = float(expected.double().square().mean().sqrt())
    torch.testing.assert_close(found.double(), expected.double(), rtol=relative, atol=slack * relative * typical)


def round_to_fp8_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch round to FP8 in Triton's interpreter, which loses a carry."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != triton.language.float8e4nv or source != triton.language.float32:
            return convert(x, source, target, mode)
        values = torch.from_numpy(x.view(np.float32).copy()).to(torch.float8_e4m3fn)
        return values.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
