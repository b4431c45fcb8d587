"""Logits with K and V of 8 bits, against Transformers with a cache that rounds; and the scales of checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.kv_dtype import FP8, FP8_MAX, UNSCALED, LayerScales, quantize, scales_text
from radixkv.runtime.device.weights.open import open_weights
from radixkv.settings.config import KVCacheDtype
from support.checkpoints import edited_config, edited_tensors, save_checkpoint
from support.device_support import CHECKPOINTS, load_oracle, logits_of, random_ids

N_TOKENS = 70


class RoundingCache(DynamicCache):
    """K and V as 8 bits hold them."""

    def __init__(self, scales: list[LayerScales]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = (
            (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale
            for x, scale in zip((keys, values), self.scales[layer], strict=True)
        )
        return super().update(keys, values, layer, *args, **kwargs)


def with_tensors(source: Path, target: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    """Returns a copy of a checkpoint with more tensors."""
    shutil.copytree(source, target)
    with edited_tensors(target) as all_tensors:
        all_tensors |= tensors
    return resolve(str(target))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save_checkpoint(folder, **CHECKPOINTS[name])
        return folder

    return save


@pytest.mark.parametrize("name", ["grouped", "qwen2", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("has_scales", [False, True])
def test_logits_agree_with_transformers_over_a_cache_that_rounds(
    saved: Callable[[str], Path], tmp_path: Path, name: str, has_scales: bool
) -> None:
    folder, n_layers, ids = saved(name), 3, random_ids(N_TOKENS, 5)
    plain = resolve(str(folder))
    scales = [
        LayerScales(0.37 + layer, 0.011 * (layer + 1)) if has_scales else UNSCALED for layer in range(n_layers)
    ]
    names = ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale")
    tensors = {
        name.format(layer): torch.tensor(scale)
        for layer in range(n_layers)
        for name, scale in zip(names, scales[layer], strict=True)
    }
    checkpoint = with_tensors(folder, tmp_path / "scaled", tensors) if has_scales else plain
    found = logits_of(checkpoint, ids, kv_dtype=FP8)
    with torch.inference_mode():
        expected = load_oracle(plain)(torch.tensor([ids]), past_key_values=RoundingCache(scales)).logits[0]
    exact = logits_of(plain, ids)
    effect = (exact - expected).abs().max()
    assert effect > 1e-3, "rounding makes no difference that this test could see"
    # A value between two of 8 bits may be rounded to either, after sums in another order.
    assert (found - expected).abs().max() < 0.05 * effect


def test_scales_change_nothing_without_8_bits(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder, ids = saved("grouped"), random_ids(N_TOKENS, 5)
    tensors = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(3.0) for layer in range(3)}
    scaled = with_tensors(folder, tmp_path / "scaled", tensors)
    assert torch.equal(logits_of(scaled, ids), logits_of(resolve(str(folder)), ids))


def test_scales_beside_projections_or_below_them(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """One element counts as a number; what a layer lacks is 1."""
    attention = "model.layers.{}.self_attn"
    tensors = {
        f"{attention.format(0)}.k_scale": torch.tensor(0.5),
        f"{attention.format(0)}.v_scale": torch.tensor([0.25], dtype=torch.bfloat16),
        f"{attention.format(2)}.k_proj.k_scale": torch.tensor(2.0),
        f"{attention.format(2)}.v_proj.v_scale": torch.tensor(4.0),
    }
    checkpoint = with_tensors(saved("grouped"), tmp_path / "scaled", tensors)
    with open_weights(checkpoint, load_format="auto", dtype=torch.float32) as weights:
        assert weights.kv_scales() == ((0.5, 0.25), (1.0, 1.0), (2.0, 4.0))
    with open_weights(checkpoint, load_format="dummy", dtype=torch.float32) as weights:
        assert weights.kv_scales() == (UNSCALED,) * 3


def test_a_checkpoint_may_have_scales_of_the_cache_alone(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """As compressed-tensors writes what was calibrated for K and V only: no matrix is quantized."""
    folder, ids = saved("grouped"), random_ids(N_TOKENS, 5)
    tensors = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor([0.25]) for layer in range(3)}
    expected = logits_of(with_tensors(folder, tmp_path / "scaled", tensors), ids, kv_dtype=FP8)
    with_tensors(folder, tmp_path / "declared", tensors)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    settings = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    with edited_config(tmp_path / "declared") as config:
        config["quantization_config"] = settings
    declared = resolve(str(tmp_path / "declared"))
    assert torch.equal(logits_of(declared, ids, kv_dtype=FP8), expected)
    with open_weights(
        declared, load_format="auto", dtype=torch.float32, quantization="compressed-tensors"
    ) as weights:
        assert weights.kv_scales() == (LayerScales(0.25, 1.0),) * 3


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_cannot_be_is_refused(saved: Callable[[str], Path], tmp_path: Path, scale: float) -> None:
    tensors = {"model.layers.1.self_attn.v_scale": torch.tensor(scale)}
    checkpoint = with_tensors(saved("grouped"), tmp_path / "scaled", tensors)
    with (
        open_weights(checkpoint, load_format="auto", dtype=torch.float32) as weights,
        pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_scale is .*above 0"),
    ):
        weights.kv_scales()


def test_a_scale_for_each_head_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = {"model.layers.1.self_attn.k_scale": torch.ones(2)}
    checkpoint = with_tensors(saved("grouped"), tmp_path / "scaled", tensors)
    with (
        pytest.raises(CheckpointError, match="k_scale.*shape"),
        open_weights(checkpoint, load_format="auto", dtype=torch.float32),
    ):
        pass


def test_quantizing_saturates_and_shows_what_is_not_finite() -> None:
    values = torch.tensor([1e6, -1e6, float("inf"), float("nan"), 3.0, 2**-9])
    found = quantize(values, 2.0).float()
    assert found[:2].tolist() == [FP8_MAX, -FP8_MAX]
    assert found[2:4].isnan().all()
    assert found[4:].tolist() == [1.5, 0.0]


def test_the_text_of_scales_tells_them_apart() -> None:
    assert scales_text(torch.float32, [LayerScales(2.0, 3.0)]) == ""
    texts = {scales_text(FP8, layers) for layers in ([UNSCALED], [LayerScales(1.0, 2.0)], [LayerScales(2.0, 1.0)])}
    assert len(texts) == 3


def test_the_scales_and_the_dtype_are_what_pages_depend_on(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = saved("grouped")
    scaled = with_tensors(folder, tmp_path / "scaled", {"model.layers.2.self_attn.v_scale": torch.tensor(0.5)})

    def identity(checkpoint: Checkpoint, kv_cache_dtype: KVCacheDtype) -> tuple[str, str, str]:
        executor = CpuExecutor(
            checkpoint,
            DeviceSettings(
                page_size=4,
                max_num_seqs=2,
                max_model_len=64,
                kv_cache_memory_bytes=1 << 20,
                max_total_tokens=None,
                kv_cache_dtype=kv_cache_dtype,
                max_num_batched_tokens=2048,
            ),
        )
        return executor.dtype, executor.kv_dtype, executor.page_origin.scales

    plain = resolve(str(folder))
    assert identity(scaled, "auto") == identity(plain, "auto") == ("float32", "float32", "")
    assert identity(plain, "fp8") == ("float32", "fp8_e4m3", "1.0 1.0; 1.0 1.0; 1.0 1.0")
    assert identity(scaled, "fp8_e4m3") == ("float32", "fp8_e4m3", "1.0 1.0; 1.0 1.0; 1.0 0.5")
