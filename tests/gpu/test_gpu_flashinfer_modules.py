"""FlashInfer's modules by the names that FlashInfer gives them, and prebuilt ones without FlashInfer's package."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch

from radixkv.runtime.device.attention.cuda import flashinfer_modules as modules
from radixkv.runtime.device.attention.cuda.base import AttentionShape

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("backend", "dtype", "has_8_bits", "is_windowed"),
    list(product(["fa2", "fa3"], [torch.bfloat16, torch.float16], [False, True], [False, True])),
)
def test_names(backend, dtype, has_8_bits, is_windowed):
    shape = AttentionShape(32, 8, 64, 16, dtype, 0.125, FP8 if has_8_bits else dtype)
    assert modules._name(backend, shape, is_windowed) == modules._spec(backend, shape, is_windowed).name


def test_a_prebuilt_module_is_loaded_without_the_package():
    shape = AttentionShape(32, 8, 128, 16, torch.bfloat16, 128**-0.5, torch.bfloat16)
    capability = torch.cuda.get_device_capability()
    backend = modules.backend_of(capability)
    if modules._prebuilt(modules._name(backend, shape, False), capability) is None:
        pytest.skip("this machine has no prebuilt module")
    script = (
        "import sys, torch\n"
        "from radixkv.runtime.device.attention.cuda import flashinfer_modules as modules\n"
        "from radixkv.runtime.device.attention.cuda.base import AttentionShape\n"
        "shape = AttentionShape(32, 8, 128, 16, torch.bfloat16, 128**-0.5, torch.bfloat16)\n"
        f"module = modules.load({backend!r}, shape, False, {capability!r})\n"
        "module.paged_run\n"
        "print('flashinfer' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
