"""Weights have the same values whichever way they are loaded."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from radixkv.checkpoints import Checkpoint
from radixkv.errors import CheckpointError
from radixkv.runtime.device.weights.layer_weights import MlpWeights, Part
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.parallel_load import ParallelLoader, in_pieces
from radixkv.runtime.device.weights.safetensors import SafetensorsFiles
from radixkv.runtime.device.weights.shards import Cuts, Shard, ShardedTensors
from radixkv.runtime.device.weights.weights import Weights
from support.device_support import CHECKPOINTS, PieceLane, PlainLane

Get = Callable[[str], Checkpoint]


class SeparateDraws:
    """Random tensors drawn one after another without stacking."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        bound = math.sqrt(3 / shape[-1])
        return torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=self.generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_random_matrices_have_the_values_of_separate_ones(checkpoint: Get, dtype: torch.dtype) -> None:
    draw = SeparateDraws()
    with open_weights(checkpoint("grouped"), load_format="dummy", dtype=dtype) as weights:
        config = weights.config
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        assert torch.equal(weights.embedding(), draw(config.vocab_size, hidden, dtype=dtype))
        layer = weights.layer(0)
    query, key = config.n_heads * head_dim, config.n_kv_heads * head_dim
    stacked = torch.cat([draw(n, hidden, dtype=dtype) for n in (query, key, key)])
    assert torch.equal(layer.mixer.query_key_value.weight, stacked)
    assert torch.equal(layer.output.weight, draw(hidden, query, dtype=dtype))
    assert isinstance(layer.mlp, MlpWeights)
    assert torch.equal(layer.mlp.gate_up.weight, torch.cat([draw(inner, hidden, dtype=dtype) for _ in range(2)]))
    assert torch.equal(layer.mlp.down.weight, draw(hidden, inner, dtype=dtype))
    assert torch.equal(layer.attention_norm.weight, torch.ones(hidden, dtype=dtype))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_n_bytes_is_the_size_of_all_tensors(checkpoint: Get, name: str) -> None:
    with open_weights(checkpoint(name), load_format="auto", dtype=torch.bfloat16) as weights:
        storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, tensors_of(weights))}
        n_bytes = sum(storage.nbytes() for storage in storages.values())
        assert n_bytes == weights.n_bytes <= weights.peak_bytes


class SlowViews:
    """Tensors whose views are returned only when ``n_lanes`` threads wait for one."""

    def __init__(self, tensors: dict[str, Tensor], n_lanes: int) -> None:
        self._tensors = tensors
        self._barrier = threading.Barrier(n_lanes, timeout=120)

    def view(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{name} cannot be read")
        self._barrier.wait()
        return self._tensors[name]


def test_tensors_are_read_in_parallel_and_are_complete_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {str(i): torch.full((3, 1 << 18), float(i)) for i in range(8)}
    with torch.inference_mode():  # worker threads do not inherit inference mode but must write to its tensors
        outs = {name: torch.zeros(3, 1 << 18, dtype=torch.bfloat16) for name in tensors}
    with (
        caplog.at_level(logging.INFO),
        ParallelLoader(SlowViews(tensors, 4), [PlainLane() for _ in range(4)], log_interval_s=0.0) as reads,
    ):
        for name, out in outs.items():
            reads.fill(name, out)
    for name, out in outs.items():
        assert torch.equal(out, tensors[name].to(torch.bfloat16))
    assert [record.getMessage().partition(":")[0] for record in caplog.records[:8]] == ["loading weights"] * 8
    assert "loaded 0.0 GiB of weights in" in caplog.text


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5-moe", "qwen3-next"])
def test_experts_are_read_into_their_places_in_parallel(checkpoint: Get, name: str) -> None:
    """A GPU's loader fills tensors after ``layer`` has returned them, so nothing may copy from them."""
    with open_weights(checkpoint(name), load_format="auto", dtype=torch.float32) as weights:
        expected = tensors_of(weights)
    with ExitStack() as files, torch.inference_mode():
        views = SafetensorsFiles(checkpoint(name).folder, files)
        with ParallelLoader(views, [PlainLane() for _ in range(4)]) as reads:
            found = tensors_of(Weights(weights.config, reads, torch.float32, torch.device("cpu")))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["grouped", "opt", "gemma3", "gpt-oss", "qwen3-moe", "qwen3.5", "qwen3-next"])
def test_ranks_read_their_parts_in_parallel(checkpoint: Get, name: str) -> None:
    """A GPU's loader reads parts whose rows are not side by side in their files."""
    n_ranks = 2
    for rank in range(n_ranks):
        shard = Shard(rank, n_ranks)
        with open_weights(checkpoint(name), load_format="auto", dtype=torch.float32, shard=shard) as weights:
            expected = tensors_of(weights)
        with open_weights(checkpoint(name), load_format="auto", dtype=torch.float32) as whole, ExitStack() as files:
            cuts = Cuts.of(whole.config, shard, None, None)
            parts = ShardedTensors(SafetensorsFiles(checkpoint(name).folder, files), cuts, is_first=rank == 0)
            with ParallelLoader(parts, [PieceLane() for _ in range(4)]) as reads:
                found = tensors_of(Weights(weights.config, reads, torch.float32, torch.device("cpu")))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(1, 100), st.data())
def test_pieces_are_small_and_make_up_the_whole(
    n_rows: int, n_columns: int, n_layers: int, n_elements: int, data: st.DataObject
) -> None:
    whole = torch.arange(n_layers * n_rows * n_columns).view(n_layers, n_rows, n_columns)
    dimension = data.draw(st.integers(0, 2))
    first = data.draw(st.integers(0, whole.shape[dimension] - 1))
    source = whole.narrow(dimension, first, data.draw(st.integers(1, whole.shape[dimension] - first)))
    out = torch.full(source.shape, -1)
    for part, target in in_pieces(source, out, n_elements):
        assert part.numel() <= n_elements
        target.copy_(part)
    assert torch.equal(out, source)


def test_a_read_error_is_raised_when_the_block_ends() -> None:
    reads = ParallelLoader(SlowViews({}, 1), [PlainLane()])
    with pytest.raises(CheckpointError, match="b cannot be read"), reads:
        reads.fill("b", torch.zeros(1))


def test_an_error_in_the_block_takes_precedence_over_read_errors() -> None:
    reads = ParallelLoader(SlowViews({}, 1), [PlainLane()])
    reads.fill("b", torch.zeros(1))
    with pytest.raises(ZeroDivisionError), reads:
        raise ZeroDivisionError


def tensors_of(weights: Weights) -> list[Tensor]:
    tensors: list[Tensor] = [weights.embedding()]
    if not weights.config.tied_head:
        tensors.append(weights.head())
    parts: list[object] = [weights.final_norm(), weights.position_embedding(), weights.layer_inputs()]
    parts += [weights.layer(index) for index in range(weights.config.n_layers)]
    while parts:
        part = parts.pop()
        if isinstance(part, Tensor):
            tensors.append(part)
        elif isinstance(part, tuple):
            parts += part
        elif part is not None and not isinstance(part, int | Part):
            parts += vars(part).values()
    return tensors


def test_files_are_not_modified(checkpoint: Get) -> None:
    """Tensors are copies of the memory-mapped files."""
    source = checkpoint("grouped")
    before = (source.folder / "model.safetensors").read_bytes()
    with open_weights(source, load_format="auto", dtype=torch.float32) as weights:
        weights.embedding().zero_()
        again = weights.embedding()
    assert again.abs().max() > 0
    assert (source.folder / "model.safetensors").read_bytes() == before
