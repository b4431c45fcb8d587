"""Where built modules of FlashInfer are found. What FlashInfer itself says is tested on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.flashinfer_modules import not_compiled

SHAPE = AttentionShape(32, 8, 128, 16, torch.bfloat16, 128**-0.5, torch.bfloat16)
FA3 = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_"
    "head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90"
)
FA2 = FA3.removesuffix("_sm90")
HOPPER, AMPERE = (9, 0), (8, 0)

Build = Callable[[str, str], None]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Returns a function that puts a module into a folder, which is below a home with FlashInfer 0.6.12.

    FlashInfer is a package that cannot be imported, so a test fails that needs more than its folder.
    """
    package = tmp_path / "site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    about = tmp_path / "site" / "flashinfer_python-0.6.12.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.12\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE", raising=False)

    def build(folder: str, name: str) -> None:
        target = tmp_path / folder / name
        target.mkdir(parents=True)
        (target / f"{name}.so").touch()

    return build


@pytest.mark.parametrize(
    ("folder", "name", "capability"),
    [
        ("site/flashinfer/data/aot", FA3, HOPPER),
        (".cache/flashinfer/0.6.12/90a/cached_ops", FA3, HOPPER),
        (".cache/flashinfer/0.6.12/80/cached_ops", FA2, AMPERE),
    ],
)
def test_built_modules_are_found(build: Build, folder: str, name: str, capability: tuple[int, ...]) -> None:
    build(folder, name)
    assert not_compiled(SHAPE, [None, None], capability) == []


def test_the_package_of_prebuilt_modules_comes_first(build: Build, tmp_path: Path) -> None:
    build("site/flashinfer_jit_cache/jit_cache", FA3)
    (tmp_path / "site" / "flashinfer_jit_cache" / "__init__.py").write_text("raise AssertionError('imported')")
    assert not_compiled(SHAPE, [None], HOPPER) == []


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (".cache/flashinfer/0.6.12/80/cached_ops", FA3),
        (".cache/flashinfer/0.6.11/90a/cached_ops", FA3),
        (".cache/flashinfer/0.6.12/90a/cached_ops", FA2),
        (".cache/flashinfer/0.6.12/90a/cached_ops", FA3.replace("swa_False", "swa_True")),
    ],
)
def test_flashinfer_is_asked_for_others(build: Build, folder: str, name: str) -> None:
    """A module for another architecture, of another release, or of another kernel is none."""
    build(folder, name)
    with pytest.raises(AssertionError, match="imported"):
        not_compiled(SHAPE, [None], HOPPER)
