"""FlashInfer's modules by the names that FlashInfer gives them, and prebuilt ones without FlashInfer's package."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from radixkv.runtime.device.attention.cuda import flashinfer_modules as modules
from radixkv.runtime.device.attention.cuda.base import AttentionShape

FP8 = torch.float8_e4m3fn
SHAPE = AttentionShape(32, 8, 128, 16, torch.bfloat16, 128**-0.5, torch.bfloat16)


@pytest.mark.parametrize(
    ("backend", "dtype", "has_8_bits", "is_windowed"),
    list(product(["fa2", "fa3"], [torch.bfloat16, torch.float16], [False, True], [False, True])),
)
def test_names(backend, dtype, has_8_bits, is_windowed):
    shape = AttentionShape(32, 8, 64, 16, dtype, 0.125, FP8 if has_8_bits else dtype)
    assert modules.name_of(backend, shape, is_windowed) == modules.spec_of(backend, shape, is_windowed).name


def test_prebuilt_modules_are_loaded_without_the_package():
    """By attention that is built as an engine builds it."""
    capability = torch.cuda.get_device_capability()
    if modules.find_prebuilt(modules.name_of(modules.backend_of(capability), SHAPE, False), capability) is None:
        pytest.skip("this machine has no prebuilt module")
    script = (
        "import sys\n"
        "from attention_world import World\n"
        "from test_gpu_flashinfer_modules import SHAPE\n"
        "World(SHAPE)\n"
        "print('flashinfer' in sys.modules)"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "False"


def test_a_file_that_cannot_be_loaded_is_not_the_end(monkeypatch, tmp_path, caplog):
    """FlashInfer then loads another, or compiles it."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(modules, "find_prebuilt", lambda *_: broken)
    capability = torch.cuda.get_device_capability()
    assert modules.load(modules.backend_of(capability), SHAPE, False, capability).paged_run
    assert f"{broken} cannot be loaded" in caplog.text
