"""Kernels, compiled for several GPUs, fit the shared memory of each. Needs no GPU:
``pytest --noconftest tests/gpu/test_gpu_kernels_targets.py``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from kernel_support import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from radixkv.runtime.device.attention.cuda import decode_kernel as decode_kernel
from radixkv.runtime.device.attention.cuda import merge as merge_kernel
from radixkv.runtime.device.attention.cuda import prefill_kernel
from radixkv.runtime.device.attention.cuda import sinks as sinks_kernel
from radixkv.runtime.device.attention.cuda.decode_tiles import TileConfig, Variant, choose_tile_config
from radixkv.runtime.device.attention.cuda.triton_prefill import choose_prefill_tile
from radixkv.runtime.device.kv_dtype import FP8_MAX
from radixkv.runtime.device.machine import MIN_FP8_CAPABILITY
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.model_support import MAX_HEADS_PER_KV_HEAD
from radixkv.runtime.device.ops.cuda import expert_routing as routing
from radixkv.runtime.device.ops.cuda import (
    expert_sums,
    fp8_linear,
    int4_linear,
    int4_product,
    linear,
    logit_cap,
    lora,
    norm,
    partial_rotary,
    rotary,
    token_inputs,
)
from radixkv.runtime.device.ops.cuda import gated_linear as gated
from radixkv.runtime.device.ops.cuda import grouped_linear as grouped
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.delta_net import blocks as delta_blocks
from radixkv.runtime.device.ops.cuda.delta_net import convolution, gated_norm
from radixkv.runtime.device.ops.cuda.delta_net import scan as delta_scan
from radixkv.runtime.device.ops.cuda.delta_net import step as delta_step
from radixkv.runtime.device.ops.cuda.mamba2 import blocks as mamba2_blocks
from radixkv.runtime.device.ops.cuda.mamba2 import gated_norm as mamba2_norm
from radixkv.runtime.device.ops.cuda.mamba2 import scan as mamba2_scan
from radixkv.runtime.device.ops.cuda.mamba2 import step as mamba2_step
from radixkv.runtime.device.weights.fp8_matrix import BLOCK, Fp8Matrix, Fp8Scales
from radixkv.runtime.device.weights.int4_matrix import Int4Groups, Int4Matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory a thread block may use, by compute capability; 1,024 bytes more belong to the driver."""

FP8_TARGETS = [target for target in SHARED_BYTES if target >= 10 * MIN_FP8_CAPABILITY[0] + MIN_FP8_CAPABILITY[1]]


def shared_bytes(
    kernel: Any,
    target: int,
    kinds: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    aligned: set[str],
    **options: int,
) -> int:
    """Compiles a kernel and returns the shared memory of its thread block."""
    function = kernel.function if isinstance(kernel, CachedKernel) else kernel
    names = function.arg_names
    overlap = {"OVERLAP": target >= 90}
    constants = {**constants, **overlap}
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        function,
        {name: "constexpr" if name in constants else kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    launch = {"launch_pdl": True} if target >= 90 else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options={**options, **launch})
    return int(compiled.metadata.shared)


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("n_out", [4096, 128_256])
def test_products_of_few_rows_fit(n_out: int, target: int) -> None:
    tile = linear.thin_tile(n_out, has_room=SHARED_BYTES[target] >= 160_000)
    kinds = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "n_x": "i32", "n_out": "i32", "n_in": "i32"}
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.n_stages}
    taken = shared_bytes(
        linear._multiply_thin, target, kinds, constants, aligned={*kinds} - {"n_x"}, num_warps=tile.n_warps
    )
    assert taken <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("window_pitch", [None, 480])
def test_inputs_of_tokens_compile(window_pitch: int | None, target: int) -> None:
    kernel = token_inputs._prepare_token_inputs
    constants = {"PAGE_SIZE": 16, "PITCH": 96, "WINDOW_PITCH": window_pitch, "ROWS": 1, "TOKENS": 256}
    kinds = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(
        ["table_stride", "padding_slot", "n_rows"], "i32"
    )
    assert shared_bytes(kernel, target, kinds, constants, aligned={"tables", "window_tables"}) == 0


@pytest.mark.parametrize("target", [90, 120])
@pytest.mark.parametrize("n_rows", [17, 128])
def test_products_with_their_activation_fit(n_rows: int, target: int) -> None:
    tile = gated.gated_tile(n_rows)
    ends = f"<bf16[{tile.rows}, {gated._COLUMNS}]>"
    kinds = {
        "x": f"tensordesc<bf16[{tile.rows}, {gated._DEPTH}]>",
        "weight": f"tensordesc<bf16[{gated._COLUMNS}, {gated._DEPTH}]>",
        "out": f"tensordesc{ends}",
        "n_row_tiles": "i32",
        "n_inner": "i32",
        "n_in": "i32",
    }
    constants = {"ROWS": tile.rows, "COLUMNS": gated._COLUMNS, "DEPTH": gated._DEPTH}
    taken = shared_bytes(
        gated._multiply_gated,
        target,
        kinds,
        constants,
        aligned={"n_inner", "n_in"},
        num_warps=4,
        num_stages=tile.n_stages,
    )
    assert taken <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("n_pairs", [8, 2048, 65_536])
@pytest.mark.parametrize(("kind", "half"), [*product(["bf16", "fp32"], ["gated", "first", "second"])])
def test_products_of_experts_fit(kind: str, half: str, n_pairs: int, target: int) -> None:
    item_size = 2 if kind == "bf16" else 4
    tiles = grouped.grouped_tiles(n_pairs, 128, item_size, has_room=SHARED_BYTES[target] >= 160_000)
    kinds = dict.fromkeys(("x", "weight", "bias", "out"), f"*{kind}")
    check_grouped(kinds, tiles, target, scale_unit=0, half=half)


@pytest.mark.parametrize("target", FP8_TARGETS)
@pytest.mark.parametrize("n_pairs", [8, 2048, 65_536])
@pytest.mark.parametrize("scale_unit", [1, BLOCK])
@pytest.mark.parametrize("half", ["gated", "first", "second"])
def test_products_of_experts_in_fp8_fit(half: str, scale_unit: int, n_pairs: int, target: int) -> None:
    has_room = SHARED_BYTES[target] >= 160_000
    tiles = grouped.grouped_tiles(n_pairs, 128, 1, has_room=has_room, has_blocks=scale_unit > 1)
    kinds = dict.fromkeys(("x", "weight"), "*fp8e4nv") | dict.fromkeys(("bias", "out"), "*bf16")
    check_grouped(kinds, tiles, target, scale_unit=scale_unit, half=half)


def check_grouped(
    kinds: dict[str, str], tiles: grouped.GroupedTiles, target: int, *, scale_unit: int, half: str
) -> None:
    tile = tiles.second if half == "second" else tiles.first
    kinds = kinds | dict.fromkeys(("order", "tiles"), "*i32") | dict.fromkeys(("x_scales", "scales"), "*fp32")
    kinds |= dict.fromkeys(("n_tiles", "n_out", "n_in", "x_group_stride"), "i32")
    constants = {
        "SCALE_UNIT": scale_unit,
        "N_ACTIVE": 8,
        "PARTS": tiles.first.rows // tile.rows,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "STAGES": tile.n_stages,
        "GROUP": tile.group,
        "IS_WHOLE": True,
        "HAS_BIAS": True,
        "IS_FIRST": half != "second",
        "IS_GATED": half == "gated",
        "ROW_FACTORS": grouped.has_row_factors(tile, scale_unit, 2 * BLOCK, is_gated=half == "gated"),
        "CLAMPS": half == "gated",
        "IS_GELU": False,  # takes no shared memory
    }
    taken = shared_bytes(
        grouped._multiply_grouped,
        target,
        kinds,
        constants,
        aligned={*kinds} - {"n_tiles", "x_group_stride"},
        num_warps=tile.n_warps,
    )
    assert taken <= SHARED_BYTES[target], tile


@pytest.mark.parametrize(("target", "converts"), [*product(SHARED_BYTES, [True]), *product(FP8_TARGETS, [False])])
@pytest.mark.parametrize("n_rows", [1, 32, 64, 256])
@pytest.mark.parametrize("scales", ["channels", "blocks"])
def test_products_of_fp8_weights_fit(scales: Fp8Scales, n_rows: int, target: int, converts: bool) -> None:
    weight = Fp8Matrix.allocate((4096, 256), scales=scales, device=torch.device("cpu"))
    tile = fp8_linear.weight_only_tile(n_rows)
    if not converts:
        tile = fp8_linear.fp8_tile(n_rows, weight, has_room=SHARED_BYTES[target] >= 160_000)
    kinds = {"x": "*bf16", "weight": "*u8"} if converts else dict.fromkeys(("x", "weight"), "*fp8e4nv")
    kinds |= {"out": "*bf16"} | dict.fromkeys(("x_scales", "scales"), "*fp32")
    kinds |= dict.fromkeys(("n_x", "n_out", "n_in", "out_stride", "scale_stride", "x_group_stride"), "i32")
    constants = {
        "ROWS": tile.n_out,
        "X_ROWS": tile.n_rows,
        "COLUMNS": tile.n_in,
        "STAGES": tile.n_stages,
        "SCALE_BLOCK": BLOCK if weight.has_blocks else 0,
        "IS_EVEN": True,
        "CONVERTS": converts,
    }
    taken = shared_bytes(
        fp8_linear._multiply_fp8,
        target,
        kinds,
        constants,
        aligned={"x", "weight", "out", "scales", "n_out", "n_in", "out_stride"},
        num_warps=tile.n_warps,
    )
    assert taken <= SHARED_BYTES[target], tile


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("n_rows", [1, 16, 32, 64])
@pytest.mark.parametrize(
    ("kind", "n_words", "gated", "sizes"),
    [("bf16", 4, False, (4096, 4096)), ("bf16", 4, True, (28_672, 4096)), ("fp16", 1, False, (4096, 14_336))],
)
def test_products_of_4_bit_weights_fit(
    kind: str, n_words: int, gated: bool, sizes: tuple[int, int], n_rows: int, target: int
) -> None:
    weight = Int4Matrix.allocate(sizes, Int4Groups(128), torch.device("meta"))
    tile = int4_linear.int4_tile(n_rows, weight)
    kinds = {"x": f"*{kind}", "values": "*i32", "scales": "*i32", "out": f"*{kind}"}
    kinds |= dict.fromkeys(("n_x", "n_channels", "n_in", "n_words", "units_of_group"), "i32")
    constants = {
        "ROWS": tile.n_out,
        "X_ROWS": tile.n_rows,
        "WARPS": tile.n_warps,
        "UNITS": tile.n_warps * tile.n_units,
        "WORDS": n_words,
        "GATED": gated,
    }
    taken = shared_bytes(
        int4_product._multiply_int4,
        target,
        kinds,
        constants,
        aligned={*kinds} - {"n_x", "units_of_group"},
        num_warps=tile.n_warps,
        **({} if tile.n_registers is None else {"maxnreg": tile.n_registers}),
    )
    assert taken <= SHARED_BYTES[target], tile


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("n_experts", [8, 128, 1000])
def test_routing_fits(n_experts: int, target: int) -> None:
    block_experts = 1 << max(n_experts - 1, 15).bit_length()
    block_tokens = routing._block_tokens(8192, block_experts)
    names = ("logits", "expert_weights", "scales", "chosen", "counts", "order", "tiles", "n_tokens", "n_experts")
    names = (*names, "n_tiles")
    kinds = dict.fromkeys(names[:3], "*bf16") | dict.fromkeys(names[3:7], "*i32") | dict.fromkeys(names[7:], "i32")
    kinds |= {"correction": "*fp32", "scale": "fp32"}
    sizes = {"N_ACTIVE": 8, "ROWS": 16, "TOKENS": block_tokens, "EXPERTS": block_experts, "TILES": routing._TILES}
    for kernel, constants in (
        (routing._choose_experts, {"NORMALIZES": True, "HAS_SCALES": False, "IS_ALONE": True, "IS_SIGMOID": True}),
        (routing._choose_experts, {"NORMALIZES": True, "HAS_SCALES": True, "IS_ALONE": True, "IS_SIGMOID": False}),
        (routing._choose_experts, {"NORMALIZES": True, "HAS_SCALES": True, "IS_ALONE": False, "IS_SIGMOID": False}),
        (routing._order_pairs, {"BLOCKS": routing._BLOCKS}),
    ):
        aligned = {*names[:7]} & {*kernel.function.arg_names}
        taken = shared_bytes(kernel, target, kinds, sizes | constants, aligned=aligned, num_warps=8)
        assert taken <= SHARED_BYTES[target]


def tile_configs_of(head_dim: int, target: int, *, has_8_bits: bool) -> set[TileConfig]:
    """Returns all configurations that may be chosen on such a GPU."""
    variants: tuple[Variant, ...] = ("whole", "split", "shared")
    shared_bytes_limit = SHARED_BYTES[target] + 1024
    return {
        choose_tile_config(variant, n, 100, head_dim, shared_bytes_limit, has_8_bits=has_8_bits)
        for variant, n in product(variants, (1, 150, 500, 5000))
    }


@pytest.mark.parametrize(("target", "kv"), [*product(SHARED_BYTES, ["*bf16"]), *product(FP8_TARGETS, ["*i16"])])
@pytest.mark.parametrize(
    ("head_dim", "max_group", "has_sinks", "has_limits"),
    [
        *((*sizes, False, False) for sizes in MAX_HEADS_PER_KV_HEAD.items()),
        (64, MAX_HEADS_PER_KV_HEAD[64], True, False),
        (64, 64, True, True),
        (128, 64, False, True),
        (256, 32, False, True),
        (512, 32, False, True),
    ],
)
def test_attention_of_decode_rows_fits(
    head_dim: int, max_group: int, has_sinks: bool, has_limits: bool, target: int, kv: str
) -> None:
    kinds = dict.fromkeys(("q", "out", "values"), "*bf16") | dict.fromkeys(("k_cache", "v_cache"), kv)
    kinds |= dict.fromkeys(("tables", "items", "order"), "*i32") | dict.fromkeys(("lse", "sinks"), "*fp32")
    kinds |= dict.fromkeys(("scale", "value_scale"), "fp32")
    kinds |= dict.fromkeys(("column", "q_stride", "page_stride"), "i32")
    for tile_config in tile_configs_of(head_dim, target, has_8_bits=kv == "*i16"):
        constants = {
            "GROUP": max_group,
            "KV_HEADS": 1,
            "DIM": head_dim,
            "PAGE": 16,
            "TOKEN_STRIDE": head_dim // 2 if kv == "*i16" else head_dim,
            "TILE": max_group,
            "TOKENS": tile_config.n_tokens,
            "STAGES": tile_config.n_stages,
            "IS_AHEAD": tile_config.is_ahead,
            "HAS_PAIRS": kv == "*i16",
            "USES_PTX": True,
            "KV_STEP": max_group,
            "MEMBER_STEP": 1,
            "HAS_SINKS": has_sinks,
            "HAS_LIMITS": has_limits,
        }
        taken = shared_bytes(
            decode_kernel._attend_decode,
            target,
            kinds,
            constants,
            aligned={*kinds} - {"scale", "value_scale"},
            num_warps=tile_config.n_warps,
        )
        assert taken <= SHARED_BYTES[target], tile_config


@pytest.mark.parametrize(("target", "kv"), [*product(SHARED_BYTES, ["*bf16"]), *product(FP8_TARGETS, ["*i16"])])
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "has_sinks"),
    [(64, 8, 128, True), (128, 4, 0, False), (256, 32, 512, False), (512, 32, 0, False)],
)
def test_attention_of_prompts_fits(
    head_dim: int, group: int, window: int, has_sinks: bool, target: int, kv: str
) -> None:
    tile = choose_prefill_tile(head_dim, SHARED_BYTES[target] + 1024, has_8_bits=kv == "*i16")
    kinds = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("k_cache", "v_cache"), kv)
    kinds |= dict.fromkeys(("tables", "items"), "*i32") | {"sinks": "*fp32"}
    kinds |= dict.fromkeys(("scale", "value_scale"), "fp32") | dict.fromkeys(("q_stride", "page_stride"), "i32")
    constants = {
        "COLUMNS": prefill_kernel.N_PROMPT_COLUMNS,
        "GROUP": group,
        "KV_HEADS": 2,
        "DIM": head_dim,
        "PAGE": 16,
        "TOKEN_STRIDE": head_dim if kv == "*i16" else 2 * head_dim,
        "WINDOW": window,
        "PAIRS": tile.n_pairs,
        "KEYS": tile.n_keys,
        "STAGES": tile.n_stages,
        "HAS_WORDS": kv == "*i16",
        "USES_PTX": True,
        "HAS_SINKS": has_sinks,
    }
    taken = shared_bytes(
        prefill_kernel._attend_prompts,
        target,
        kinds,
        constants,
        aligned={*kinds} - {"scale", "value_scale"},
        num_warps=tile.n_warps,
    )
    assert taken <= SHARED_BYTES[target], tile


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("is_few", [False, True])
def test_merging_results_fits(is_few: bool, has_sinks: bool, target: int) -> None:
    kinds = dict.fromkeys(("values", "out"), "*bf16") | dict.fromkeys(("lse", "sinks"), "*fp32")
    kinds |= dict.fromkeys(("indptr", "indices", "order"), "*i32") | {"n_heads": "i32", "value_scale": "fp32"}
    constants = {
        "RESULTS": 8 if is_few else 2,
        "HEADS": 1 if is_few else 8,
        "HEAD_DIM": 512,
        "DIM": 512,
        "GROUP": 8,
        "KV_STEP": 8,
        "MEMBER_STEP": 1,
        "IS_SCALED": True,
        "HAS_SINKS": has_sinks,
    }
    taken = shared_bytes(
        merge_kernel._merge_results,
        target,
        kinds,
        constants,
        aligned={*kinds} - {"value_scale"},
        num_warps=2 if is_few else 4,
    )
    assert taken <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_applying_sinks_fits(target: int) -> None:
    kinds = {"out": "*bf16", "lse": "*fp32", "sinks": "*fp32", "n_heads": "i32"}
    constants = {"HEADS": 64, "HEAD_DIM": 64, "DIM": 64}
    taken = shared_bytes(sinks_kernel._apply_sinks, target, kinds, constants, aligned={*kinds}, num_warps=8)
    assert taken <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", FP8_TARGETS)
def test_storing_k_and_v_of_8_bits_compiles(target: int) -> None:
    kinds = dict.fromkeys(("qkv", "q_out", "query_norm", "key_norm"), "*bf16")
    kinds |= dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv") | dict.fromkeys(
        ("positions", "slot_mapping"), "*i32"
    )
    kinds |= dict.fromkeys(("eps", "k_scale", "v_scale"), "fp32") | {"cosine_sine": "*fp32", "qkv_stride": "i32"}
    constants = {
        "N_HEADS": 32,
        "N_KV_HEADS": 8,
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": 128,
        "NORMS": True,
        "ADDS_ONE": False,
        "LARGEST": FP8_MAX,
    }
    aligned = {*kinds} - {"eps", "k_scale", "v_scale"}
    own_values = {"HEAD_DIM": 512, "VALUES": False, "NORMS_VALUES": True}
    for sizes in ({}, own_values, {"N_KV_HEADS": 0, "KV_HEADS": 1}, {"ROTATES": False}):
        whole = {"VALUES": True, "NORMS_VALUES": False, "ROTATES": True} | constants | sizes
        taken = shared_bytes(rotary._rotate_and_store, target, kinds, whole, aligned=aligned, num_warps=16)
        assert taken <= SHARED_BYTES[target]
    kernel, constants = partial_rotary.rotate_part_and_store, constants | {"ROTARY_DIM": 32, "ADDS_ONE": True}
    assert shared_bytes(kernel, target, kinds, constants, aligned=aligned, num_warps=4) <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_norms_with_weights_in_float32_fit(target: int) -> None:
    kinds = dict.fromkeys(("x", "residual", "out", "unrounded"), "*bf16")
    kinds |= dict.fromkeys(("weight", "scales"), "*fp32")
    kinds |= dict.fromkeys(("x_stride", "residual_stride", "out_stride", "group_stride"), "i32") | {"eps": "fp32"}
    constants = {"GROUP": 0, "KEEPS": False, "SIZE": 5376, "BLOCK": 8192, "ADDS": True, "ADDS_ONE": False}
    aligned = {*kinds} - {"eps", "group_stride"}
    assert shared_bytes(norm._norm, target, kinds, constants, aligned=aligned, num_warps=16) <= SHARED_BYTES[target]
    kinds = dict.fromkeys(("qkv", "q_out", "k_cache", "v_cache"), "*bf16")
    kinds |= dict.fromkeys(("query_norm", "key_norm", "cosine_sine"), "*fp32")
    kinds |= dict.fromkeys(("positions", "slot_mapping"), "*i32") | {"qkv_stride": "i32"}
    kinds |= dict.fromkeys(("eps", "k_scale", "v_scale"), "fp32")
    constants = {
        "VALUES": False,
        "NORMS_VALUES": True,
        "ROTATES": True,
        "N_HEADS": 32,
        "N_KV_HEADS": 4,
        "HEADS": 32,
        "KV_HEADS": 4,
        "HEAD_DIM": 512,
        "NORMS": True,
        "ADDS_ONE": False,
        "LARGEST": None,
    }
    aligned = {*kinds} - {"eps", "k_scale", "v_scale"}
    taken = shared_bytes(rotary._rotate_and_store, target, kinds, constants, aligned=aligned, num_warps=16)
    assert taken <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_limits_of_logits_fit(target: int) -> None:
    kinds, constants = {"logits": "*bf16", "cap": "fp32"}, {"SIZE": 262_144, "BLOCK": logit_cap._BLOCK}
    assert shared_bytes(logit_cap._cap, target, kinds, constants, aligned={"logits"}, num_warps=8) == 0


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("group", [BLOCK, 4096])
@pytest.mark.parametrize("target", FP8_TARGETS)
def test_norms_in_fp8_fit(target: int, group: int, keeps: bool) -> None:
    """Alone, and after the sums of a mixture of experts."""
    kinds = dict.fromkeys(("x", "residual", "weight", "unrounded"), "*bf16") | {"out": "*fp8e4nv"}
    kinds |= dict.fromkeys(("products", "expert_weights", "norm_weight"), "*bf16") | {"scales": "*fp32"}
    kinds |= dict.fromkeys(("x_stride", "residual_stride", "out_stride", "group_stride"), "i32") | {"eps": "fp32"}
    sizes = {"GROUP": group, "KEEPS": keeps, "SIZE": 4096, "BLOCK": 4096, "ADDS_ONE": False}
    for kernel, constants in (
        (norm._norm, {"ADDS": True}),
        (expert_sums._sum_experts, {"N_ACTIVE": 8, "NORMS": True}),
    ):
        aligned = {*kinds} & {*kernel.function.arg_names} - {"eps", "group_stride"}
        taken = shared_bytes(kernel, target, kinds, sizes | constants, aligned=aligned, num_warps=8)
        assert taken <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (256, 256), (16, 16)])
def test_gated_delta_nets_fit(key_dim: int, value_dim: int, target: int) -> None:
    activations = ("x", "convolved", "projected", "inputs", "weight", "bias", "gate", "known", "written", "scores")
    activations += ("out",)
    kinds = dict.fromkeys(activations, "*bf16") | dict.fromkeys(("log_decay", "decay_bias"), "*fp32")
    kinds |= dict.fromkeys(("decays", "memory"), "*fp32") | {"eps": "fp32"}
    kinds |= dict.fromkeys(("batch_slots", "starts", "rows", "blocks"), "*i32")
    kinds |= dict.fromkeys(("x_stride", "projected_stride", "gate_stride", "n_batch_slots"), "i32")
    unaligned = {"eps", "batch_slots", "starts", "rows", "blocks", "n_batch_slots"}
    config = RecurrentConfig(frozenset(), 16, 32, key_dim, value_dim, 4)
    sizes = {"N_KEYS": 16, "N_HEADS": 32, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "CHANNELS": config.n_channels}
    sizes |= {"TAPS": 4, "DIM": max(key_dim, value_dim), "SIZE": value_dim, "HEADS": 2048 // value_dim}
    sizes |= {"HAS_BIAS": False}
    precision = delta_blocks.inverse_precision(torch.bfloat16, config)
    tile = delta_scan.scan_tile(config, has_room=SHARED_BYTES[target] >= 160_000)
    columns = min(tile.columns, value_dim)
    for kernel, constants, options in (
        (convolution._convolve_tokens, {}, {"num_warps": 1}),
        (convolution._convolve_blocks, {"BLOCK": 64, "GROUPS": 64}, {"num_warps": 8}),
        (convolution._keep_inputs, {"BLOCK": 512}, {"num_warps": 4}),
        (delta_blocks._compute_blocks, {"BLOCK": 64, "PRECISION": precision}, {"num_warps": 4}),
        (
            delta_scan._scan,
            {"BLOCK": 64, "COLUMNS": columns},
            {"num_warps": 4, "num_stages": tile.n_stages},
        ),
        (delta_step._step, {"COLUMNS": delta_step.step_columns(config)}, {"num_warps": 4}),
        (gated_norm._gated_norm, {}, {"num_warps": 4}),
    ):
        names = kernel.function.arg_names
        values = {name: value for name, value in (sizes | constants).items() if name in names}
        aligned = {*names} & {*kinds} - unaligned
        taken = shared_bytes(kernel, target, kinds, values, aligned=aligned, **options)
        assert taken <= SHARED_BYTES[target], kernel.function


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize(("state_size", "head_size"), [(128, 64), (128, 80), (256, 64), (16, 16)])
def test_layers_of_mamba2_fit(state_size: int, head_size: int, target: int) -> None:
    kinds = dict.fromkeys(("x", "convolved", "projected", "inputs", "weight", "bias", "gate", "out"), "*bf16")
    kinds |= dict.fromkeys(("log_decay", "step_bias", "skip", "scores", "steps", "decays", "memory"), "*fp32")
    kinds |= dict.fromkeys(("batch_slots", "starts", "rows", "blocks"), "*i32")
    kinds |= dict.fromkeys(("x_stride", "projected_stride", "gate_stride", "n_batch_slots"), "i32")
    kinds |= dict.fromkeys(("eps", "least_step", "most_step"), "fp32")
    unaligned = {"eps", "least_step", "most_step", "batch_slots", "starts", "rows", "blocks", "n_batch_slots"}
    config = RecurrentConfig(frozenset(), 8, 128, state_size, head_size, 4)
    tile = mamba2_scan.scan_tile(config, has_room=SHARED_BYTES[target] >= 160_000)
    group = 16 * head_size
    sizes = {"N_GROUPS": 8, "N_HEADS": 128, "KEY_DIM": state_size, "VALUE_DIM": head_size, "HEADS": 16}
    sizes |= {
        "CHANNELS": config.n_channels,
        "TAPS": 4,
        "HAS_BIAS": True,
    }
    plain = {"N_KEYS": 0, "KEY_DIM": 128, "VALUE_DIM": 128, "DIM": 128}
    for kernel, constants, options in (
        (convolution._convolve_tokens, plain, {"num_warps": 1}),
        (convolution._convolve_blocks, plain | {"BLOCK": 64, "GROUPS": 64}, {"num_warps": 8}),
        (mamba2_blocks._compute_blocks, {"BLOCK": 64}, {"num_warps": 4}),
        (
            mamba2_scan._scan,
            {"BLOCK": 64, "COLUMNS": tile.columns},
            {"num_warps": 4, "num_stages": tile.n_stages},
        ),
        (mamba2_step._step, {"COLUMNS": mamba2_step.COLUMNS}, {"num_warps": 4}),
        (
            mamba2_norm._gated_group_norm,
            {"SIZE": 8 * group, "GROUP": group, "BLOCK": 1 << (group - 1).bit_length()},
            {"num_warps": 4},
        ),
    ):
        names = kernel.function.arg_names
        values = {name: value for name, value in (sizes | constants).items() if name in names}
        aligned = {*names} & {*kinds} - unaligned
        taken = shared_bytes(kernel, target, kinds, values, aligned=aligned, **options)
        assert taken <= SHARED_BYTES[target], kernel.function


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("rank", [16, 32, 64, 128])
@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("n_rows", [16, 32])
def test_products_of_adapters_fit(n_rows: int, n_parts: int, rank: int, target: int) -> None:
    common = {"MAX_RANK": rank, "PARTS": n_parts, "SPLITS": 8, "ROWS": n_rows, "RANKS": rank}
    integers = dict.fromkeys(["ranks", "count", "slots", "rows", "tiles"], "*i32")
    sizes = dict.fromkeys(["x_stride", "n_in", "out_stride", "slot_stride", "table_stride"], "i32")
    kinds = {**integers, **sizes, **dict.fromkeys(["x", "a", "b", "out"], "*bf16")}
    kinds |= dict.fromkeys(["sums", "scales"], "*fp32")
    n_at_once = lora.parts_at_once(n_parts, rank)
    at_once = 1 << (n_at_once * rank - 1).bit_length()
    columns, n_stages = lora.shrink_tile(at_once)
    of_shrink = {"COLUMNS": columns, "PARTS_AT_ONCE": n_at_once, "RANKS_AT_ONCE": at_once}
    for kernel, constants, options in (
        (lora._shrink, of_shrink, {"num_stages": n_stages}),
        (lora._expand, {"COLUMNS": 256, "ALIGNED": True}, {}),
    ):
        aligned = {name for name in kernel.function.arg_names if name in kinds} - {"table_stride"}
        taken = shared_bytes(
            kernel, target, kinds, {**common, **constants}, aligned=aligned, num_warps=4, **options
        )
        assert taken <= SHARED_BYTES[target]
