"""The parts of quantized matrices that ranks have, as those of the dense matrices that they stand for."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.errors import ConfigError
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.int4_matrix import Int4Matrix
from radixkv.runtime.device.weights.open import WeightProducts, open_weights
from radixkv.runtime.device.weights.parallel_load import ParallelLoader
from radixkv.runtime.device.weights.shards import Shard
from radixkv.runtime.device.weights.weights import Weights
from radixkv.settings.config import LoadFormat
from support.cases import covering, rest_nightly
from support.checkpoints import edited_config, save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, PieceLane
from support.quantized_checkpoints import FORMATS, INT4_FORMATS, layer_linears, quantize_matrices, save_quantized

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def tensors_of(checkpoint: Checkpoint, shard: Shard | None, *, lanes: int = 0) -> list[Tensor]:
    """Returns all tensors of a rank's layers; those of a GPU's loader with ``lanes``."""
    with ExitStack() as stack:
        weights = stack.enter_context(
            open_weights(checkpoint, load_format="auto", dtype=torch.float32, shard=shard)
        )
        if lanes:
            views: Any = weights.source
            reads = stack.enter_context(ParallelLoader(views, [PieceLane() for _ in range(lanes)]))
            weights = Weights(
                weights.config,
                reads,
                weights.dtype,
                weights.device,
                weights.quantized,
                is_dequantized=weights.is_dequantized,
                cuts=weights.cuts,
            )
        parts: list[object] = [weights.layer(index) for index in range(weights.config.n_layers)]
    tensors = []
    while parts:
        part = parts.pop()
        if isinstance(part, Tensor):
            tensors.append(part)
        elif part is not None and not isinstance(part, tuple):  # of names
            parts += vars(part).values()
    return tensors


@pytest.mark.parametrize(
    ("name", "n_ranks"),
    rest_nightly(product([*FORMATS, "awq of experts", "fp8 blocks of experts"], [2, 4]), kept=range(0, 40, 9)),
)
def test_parts_are_those_of_the_dense_matrices(tmp_path: Path, name: str, n_ranks: int) -> None:
    """With four ranks, 24 inputs are not whole groups, nor 16 whole blocks, so some matrices are read whole."""
    name, _, experts = name.partition(" of ")
    changes = CHECKPOINTS["gpt-oss"] if name == "mxfp4" else SIZES | (EXPERTS if experts else {})
    save_quantized(tmp_path, name, **changes)
    quantized, dense = (resolve(str(tmp_path / kind)) for kind in ("quantized", "dense"))
    for rank in range(n_ranks):
        expected = tensors_of(dense, Shard(rank, n_ranks))
        for lanes in (0, 3):
            found = tensors_of(quantized, Shard(rank, n_ranks), lanes=lanes)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3.5", form) for form in ("fp8 blocks", "fp8 channels", "gptq", "int4")]
    + [("qwen3-next", "fp8 blocks"), ("nemotron-h", "fp8 blocks"), ("nemotron-h-moe", "fp8 channels")],
)
def test_parts_of_delta_nets_are_those_of_the_dense_matrices(tmp_path: Path, name: str, form: str) -> None:
    """Queries, keys and values are in one matrix, of each of which a rank has a part. In blocks of 32 rows a rank
    has whole ones of 64 queries, keys and values."""
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "intermediate_size": 96}
    save_quantized(tmp_path, form, **(HYBRIDS[name] | sizes))
    quantized, dense = (resolve(str(tmp_path / kind)) for kind in ("quantized", "dense"))
    whole = tensors_of(dense, None)
    for rank in range(2):
        expected = tensors_of(dense, Shard(rank, 2))
        assert any(one.shape != other.shape for one, other in zip(expected, whole, strict=True))
        for lanes in (0, 3):
            found = tensors_of(quantized, Shard(rank, 2), lanes=lanes)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "form", "n_ranks"),
    [("gemma4", "gptq", 4), ("gemma4-shared", "fp8 blocks", 2), ("gemma4-moe", "fp8 channels", 2)],
)
def test_parts_of_layers_of_several_shapes_are_those_of_the_dense_matrices(
    tmp_path: Path, name: str, form: str, n_ranks: int
) -> None:
    """All ranks have the one KV head of layers with full attention, and experts have parts beside the MLP's."""
    save_quantized(tmp_path, form, **CHECKPOINTS[name])
    quantized, dense = (resolve(str(tmp_path / kind)) for kind in ("quantized", "dense"))
    for rank in range(n_ranks):
        expected = tensors_of(dense, Shard(rank, n_ranks))
        found = tensors_of(quantized, Shard(rank, n_ranks))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "vocab_size"), covering(["dense", *FORMATS], [70, 200]))
def test_ranks_that_divide_the_head_read_their_tokens_of_it(tmp_path: Path, name: str, vocab_size: int) -> None:
    """The parts of 200 tokens overlap; of 70 rank 0 has 64, and the last 64 are rank 1's."""
    format = "awq" if name == "dense" else name
    changes = CHECKPOINTS["gpt-oss"] if name == "mxfp4" else SIZES
    save_quantized(tmp_path, format, **changes, vocab_size=vocab_size, tie_word_embeddings=False)
    one, dense = (resolve(str(tmp_path / kind)) for kind in ("dense" if name == "dense" else "quantized", "dense"))
    with open_weights(dense, load_format="auto", dtype=torch.float32) as weights:
        whole = weights.head()
    sizes = []
    for load_format in ("auto", "dummy"):
        settings: dict[str, Any] = {"load_format": load_format, "dtype": torch.float32}
        with open_weights(one, **settings, shard=Shard(0, 2)) as weights:
            n_bytes = weights.n_bytes
        for rank in range(2):
            with open_weights(one, **settings, shard=Shard(rank, 2), divides_head=True) as weights:
                head = weights.head()
                sizes.append(len(head))
                assert n_bytes - weights.n_bytes == (vocab_size - len(head)) * whole.shape[1] * whole.itemsize
            if load_format == "auto":
                assert torch.equal(head, whole[: len(head)] if rank == 0 else whole[-len(head) :])
    assert sizes == [{70: 64, 200: 128}[vocab_size]] * 4


def test_a_quantized_head_is_cut_when_it_is_dequantized(tmp_path: Path) -> None:
    save_quantized(tmp_path, "gptq", **SIZES, vocab_size=200, tie_word_embeddings=False)
    file = tmp_path / "quantized" / "model.safetensors"
    stored = load_file(file)
    heads = {"lm_head.weight": stored.pop("lm_head.weight")}
    parts, dense = quantize_matrices(heads, heads, FORMATS["gptq"][0])
    save_file(stored | parts, file)
    with edited_config(file.parent) as config:
        config["quantization_config"]["lm_head"] = True
    one = resolve(str(file.parent))
    for rank, expected in enumerate((dense["lm_head.weight"][:128], dense["lm_head.weight"][-128:])):
        with open_weights(
            one, load_format="auto", dtype=torch.float32, shard=Shard(rank, 2), divides_head=True
        ) as weights:
            assert torch.equal(weights.head(), expected)


def parts_of(
    checkpoint: Checkpoint, shard: Shard | None, products: tuple[WeightProducts, ...], **settings: Any
) -> list[Tensor | Fp8Matrix | Int4Matrix]:
    format: LoadFormat = "auto" if checkpoint.has_weights else "dummy"
    with open_weights(
        checkpoint, load_format=format, dtype=torch.float32, shard=shard, products=products, **settings
    ) as weights:
        return [linear.weight for linear in layer_linears(weights)]


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
"""Sizes of which two ranks have whole blocks of 128."""


@pytest.mark.parametrize(
    "name", rest_nightly(["fp8 channels", "fp8 tensor", "fp8 blocks 128", *INT4_FORMATS], kept=(0, 3))
)
def test_parts_stay_quantized(tmp_path: Path, name: str) -> None:
    save_quantized(tmp_path, name, **WIDE, **SIZES)
    quantized, dense = (resolve(str(tmp_path / kind)) for kind in ("quantized", "dense"))
    for rank in range(2):
        expected = parts_of(dense, Shard(rank, 2), ())
        for part, whole in zip(parts_of(quantized, Shard(rank, 2), ("fp8", "int4")), expected, strict=True):
            assert not isinstance(part, Tensor)
            assert isinstance(whole, Tensor)
            assert torch.equal(part.dequantize(), whole)


def test_memory_counts_what_a_rank_has(tmp_path: Path) -> None:
    """A matrix that is read whole takes more memory while it is dequantized."""
    save_quantized(tmp_path, "gptq by activation", **SIZES)
    checkpoint = resolve(str(tmp_path / "quantized"))
    formats: tuple[LoadFormat, ...] = ("auto", "dummy")
    for load_format in formats:
        bytes_of = {}
        for n_ranks in (1, 2):
            shard = None if n_ranks == 1 else Shard(0, n_ranks)
            with open_weights(checkpoint, load_format=load_format, dtype=torch.float32, shard=shard) as weights:
                bytes_of[n_ranks] = weights.dequantizing_bytes
        assert bytes_of[1] == bytes_of[2] > 0


@pytest.mark.parametrize(
    ("sizes", "quantization", "message"),
    [
        ({}, BLOCKS, "size 4 would give a rank 96 of the 384 outputs of .*layers.0.mlp.gate_proj.weight.* by 128"),
        ({"head_dim": 64}, BLOCKS, "64 of the 256 outputs of .*layers.0.self_attn.q_proj.weight"),
        (
            {"head_dim": 64, "num_attention_heads": 8},
            BLOCKS,
            "size 4 would give a rank 64 of the 128 outputs of .*layers.0.self_attn.k_proj.weight",
        ),
        (
            {},
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
            "96 of the 384 inputs of .*down_proj.weight, whose format awq divides them only by 64; use another",
        ),
        (
            {"intermediate_size": 368},
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
            "92 of the 368 outputs of .*gate_proj.weight, whose format gptq divides them only by 8",
        ),
    ],
)
def test_groups_that_do_not_divide_are_refused_before_weights_are_read(
    tmp_path: Path, sizes: dict[str, Any], quantization: dict[str, Any], message: str
) -> None:
    save_checkpoint(tmp_path, hidden_size=512, intermediate_size=384, head_dim=128, **SIZES)
    (tmp_path / "model.safetensors").unlink()
    with edited_config(tmp_path) as config:
        config |= sizes | {"quantization_config": quantization}
    with pytest.raises(ConfigError, match=message):
        parts_of(resolve(str(tmp_path), load_format="dummy"), Shard(1, 4), ("fp8", "int4"))
