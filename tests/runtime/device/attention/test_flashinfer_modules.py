"""Where prebuilt modules of FlashInfer are found. What FlashInfer itself says is tested on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.flashinfer_modules import not_compiled
from radixkv.runtime.device.kv_dtype import FP8

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
    add_metadata(tmp_path / "site", "flashinfer-python", "0.6.12")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HOME", str(tmp_path))

    def build(folder: str, name: str) -> None:
        target = tmp_path / folder / name
        target.mkdir(parents=True)
        (target / f"{name}.so").touch()

    return build


@pytest.mark.parametrize(("name", "capability"), [(FA3, HOPPER), (FA2, AMPERE)])
def test_prebuilt_modules_are_found(build: Build, name: str, capability: tuple[int, ...]) -> None:
    build("site/flashinfer/data/aot", name)
    assert not_compiled(SHAPE, [None, None], capability) == []


def test_windows_over_8_bits_need_fa2(build: Build) -> None:
    """FlashInfer's FA3 kernel never ends there."""
    shape = replace(SHAPE, kv_dtype=FP8)
    of_8_bits = FA2.replace("dtype_kv_bf16", "dtype_kv_e4m3")
    build("site/flashinfer/data/aot", of_8_bits)
    build("site/flashinfer/data/aot", of_8_bits.replace("swa_False", "swa_True"))
    assert not_compiled(shape, [128, None], HOPPER) == []


def test_the_package_of_prebuilt_modules_comes_first(build: Build, tmp_path: Path) -> None:
    build("site/flashinfer_jit_cache/jit_cache", FA3)
    add_jit_cache(tmp_path / "site", "0.6.12+cu130")
    assert not_compiled(SHAPE, [None], HOPPER) == []


def test_prebuilt_modules_of_another_release_are_none(build: Build, tmp_path: Path) -> None:
    build("site/flashinfer_jit_cache/jit_cache", FA3)
    add_jit_cache(tmp_path / "site", "0.5.0+cu130")
    with pytest.raises(AssertionError, match="imported"):
        not_compiled(SHAPE, [None], HOPPER)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (".cache/flashinfer/0.6.12/90a/cached_ops", FA3),
        ("site/flashinfer/data/aot", FA2),
        ("site/flashinfer/data/aot", FA3.replace("swa_False", "swa_True")),
    ],
)
def test_flashinfer_is_asked_for_others(build: Build, folder: str, name: str) -> None:
    """FlashInfer locks what it builds itself, so only it loads that."""
    build(folder, name)
    with pytest.raises(AssertionError, match="imported"):
        not_compiled(SHAPE, [None], HOPPER)


def add_jit_cache(site: Path, release: str) -> None:
    (site / "flashinfer_jit_cache" / "__init__.py").write_text("raise AssertionError('imported')")
    add_metadata(site, "flashinfer-jit-cache", release)


def add_metadata(site: Path, name: str, release: str) -> None:
    about = site / f"{name.replace('-', '_')}-{release}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
