"""Where prebuilt modules of FlashInfer are found. What FlashInfer itself says is tested on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.flashinfer_modules import find_prebuilt, not_compiled
from radixkv.runtime.device.kv_dtype import FP8

SHAPE = AttentionShape(32, 8, 128, 16, torch.bfloat16, 128**-0.5, torch.bfloat16)
FA3 = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_"
    "head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90"
)
FA2 = FA3.removesuffix("_sm90") + "_kv_stride_equal"
HOPPER, AMPERE = (9, 0), (8, 0)
RELEASE = "0.7.2.post1+cu130"

Build = Callable[[str, str], None]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Returns a function that puts a module into a folder, which is below a home with FlashInfer 0.7.2.post1.

    FlashInfer is a package that cannot be imported, so a test fails that needs more than its folder.
    """
    package = tmp_path / "site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    add_metadata(tmp_path / "site", "flashinfer-python", "0.7.2.post1")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HOME", str(tmp_path))

    def build(folder: str, name: str) -> None:
        target = tmp_path / folder / name
        target.mkdir(parents=True)
        (target / f"{name}.so").touch()

    yield build
    sys.modules.pop("flashinfer_jit_cache", None)


@pytest.mark.parametrize(("name", "capability"), [(FA3, HOPPER), (FA2, AMPERE)])
def test_prebuilt_modules_are_found(build: Build, name: str, capability: tuple[int, ...]) -> None:
    build("site/flashinfer/data/aot", name)
    assert not_compiled(SHAPE, [None, None], capability) == []


def test_layers_with_windows_have_a_module_of_their_own(build: Build) -> None:
    of_8_bits = FA3.replace("dtype_q_bf16_dtype_kv_bf16", "dtype_q_e4m3_dtype_kv_e4m3")
    build("site/flashinfer/data/aot", of_8_bits)
    build("site/flashinfer/data/aot", of_8_bits.replace("swa_False", "swa_True"))
    assert not_compiled(replace(SHAPE, kv_dtype=FP8), [128, None], HOPPER) == []


@pytest.mark.parametrize(
    ("architecture", "name", "capability"),
    [("sm90", FA3, HOPPER), ("sm90a", FA3, HOPPER), ("sm80", FA2, AMPERE), ("sm120f", FA2, (12, 0))],
)
def test_modules_of_an_installed_package_are_found(
    build: Build, tmp_path: Path, architecture: str, name: str, capability: tuple[int, ...]
) -> None:
    build("site/others", name)
    add_jit_cache(tmp_path / "site", [provider(tmp_path / "site/others", {"sm75", architecture}, {name})])
    assert not_compiled(SHAPE, [None], capability) == []


def test_modules_in_flashinfers_own_folder_come_first(build: Build, tmp_path: Path) -> None:
    """As in FlashInfer. Of installed packages, the one with the most special build does."""
    site = tmp_path / "site"
    for folder in ("plain", "special", "flashinfer/data/aot"):
        build(f"site/{folder}", FA3)
    add_jit_cache(site, [provider(site / "plain", {"sm90"}), provider(site / "special", {"sm90a"})])
    own = site / "flashinfer/data/aot" / FA3 / f"{FA3}.so"
    assert find_prebuilt(FA3, HOPPER) == own
    own.unlink()
    assert find_prebuilt(FA3, HOPPER) == site / "special" / FA3 / f"{FA3}.so"


@pytest.mark.parametrize(
    ("shim", "changes"),
    [
        (RELEASE, {"version": "0.7.2+cu130"}),
        (RELEASE, {"cuda_architectures": {"sm80", "sm100a"}}),
        (RELEASE, {"modules": {FA2}}),
        (RELEASE, {"jit_cache_dir": Path("/no/such/folder")}),
        ("0.7.2+cu130", {"version": "0.7.2+cu130"}),
    ],
)
def test_flashinfer_is_asked_where_no_installed_package_fits(
    build: Build, tmp_path: Path, shim: str, changes: dict[str, Any]
) -> None:
    """Its release, its GPUs or its modules are others, it lacks the file, or the list is of another release."""
    build("site/others", FA3)
    add_jit_cache(tmp_path / "site", [provider(tmp_path / "site/others") | changes], shim)
    with pytest.raises(AssertionError, match="imported"):
        not_compiled(SHAPE, [None], HOPPER)


@pytest.mark.parametrize("release", ["0.6.12+cu130", None])
def test_a_package_without_a_list_of_providers_is_not_imported(
    build: Build, tmp_path: Path, release: str | None
) -> None:
    """Releases before 0.7 have none. One that an upgrade left behind is FlashInfer's to report."""
    package = tmp_path / "site" / "flashinfer_jit_cache"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the old package is imported')")
    if release is not None:
        add_metadata(tmp_path / "site", "flashinfer-jit-cache", release)
    build("site/flashinfer/data/aot", FA3)
    assert not_compiled(SHAPE, [None], HOPPER) == []


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (".cache/flashinfer/0.7.2.post1/90a/cached_ops", FA3),
        ("site/flashinfer/data/aot", FA2),
        ("site/flashinfer/data/aot", FA3.replace("swa_False", "swa_True")),
    ],
)
def test_flashinfer_is_asked_for_others(build: Build, folder: str, name: str) -> None:
    """FlashInfer locks what it builds itself, so only it loads that."""
    build(folder, name)
    with pytest.raises(AssertionError, match="imported"):
        not_compiled(SHAPE, [None], HOPPER)


def provider(
    folder: Path, architectures: Set[str] = frozenset({"sm90a"}), modules: Set[str] = frozenset({FA3})
) -> dict[str, Any]:
    """Returns what ``flashinfer-jit-cache`` says of an installed package with modules."""
    return {
        "version": RELEASE,
        "jit_cache_dir": folder,
        "cuda_architectures": set(architectures),
        "modules": set(modules),
    }


def add_jit_cache(site: Path, providers: list[dict[str, Any]], release: str = RELEASE) -> None:
    """Adds the package ``flashinfer-jit-cache``, which lists these providers."""
    (site / "flashinfer_jit_cache").mkdir()
    (site / "flashinfer_jit_cache" / "__init__.py").write_text(
        "from pathlib import PosixPath\nfrom types import SimpleNamespace\n"
        f"def get_jit_cache_providers():\n    return tuple(SimpleNamespace(**each) for each in {providers!r})\n"
    )
    add_metadata(site, "flashinfer-jit-cache", release)


def add_metadata(site: Path, name: str, release: str) -> None:
    about = site / f"{name.replace('-', '_')}-{release}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
