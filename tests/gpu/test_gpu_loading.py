"""Loading of weights onto the GPU, and facts about the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.machine import check_machine, inspect_machine
from radixkv.runtime.device.memory.cuda.pool_size import measure_memory
from radixkv.runtime.device.weights.layer_weights import AttentionWeights, ExpertsWeights, MlpWeights
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shapes import tensor_shapes
from radixkv.runtime.device.weights.shards import Shard
from radixkv.runtime.device.weights.weights import Weights
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS
from support.quantized_checkpoints import FORMATS, save_quantized

pytestmark = pytest.mark.gpu

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 40_003,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
"""The embedding is larger than one chunk of reading."""


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    """A checkpoint of three files, in each supported dtype."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    drawn = resolve(str(tmp_path), load_format="dummy")
    with open_weights(drawn, load_format="dummy", dtype=torch.float32) as weights:
        tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(weights.config).items()}
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        some = {name: tensor.to(request.param) for name, tensor in tensors.items() if files[name] == file}
        save_file(some, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return resolve(str(tmp_path), load_format="dummy")


def tensors_of(weights: Weights) -> Iterator[Tensor]:
    yield from (weights.embedding(), weights.head(), weights.final_norm().weight)
    for index in range(weights.config.n_layers):
        layer = weights.layer(index)
        mixer = layer.mixer
        assert isinstance(mixer, AttentionWeights)
        assert mixer.query_norm is not None
        assert mixer.key_norm is not None
        assert isinstance(layer.mlp, MlpWeights)
        yield from (layer.attention_norm.weight, mixer.query_norm, mixer.key_norm, layer.mlp_norm.weight)
        yield from (mixer.query_key_value.weight, layer.output.weight)
        yield from (layer.mlp.gate_up.weight, layer.mlp.down.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gpu_has_what_the_cpu_reads(checkpoint: Checkpoint, gpu: torch.device, dtype: torch.dtype) -> None:
    with open_weights(checkpoint, load_format="auto", dtype=dtype) as weights:
        expected = list(tensors_of(weights))
    stream = torch.cuda.Stream(gpu)
    with torch.inference_mode(), torch.cuda.stream(stream):
        with open_weights(checkpoint, load_format="auto", dtype=dtype, device=gpu) as weights:
            found = list(tensors_of(weights))
        same = [torch.equal(one, other.to(gpu)) for one, other in zip(found, expected, strict=True)]
    assert all(same)
    assert {tensor.device for tensor in found} == {gpu}


@pytest.mark.parametrize("shard", [None, Shard(1, 2)], ids=["whole", "shard"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_matrices_beside_dense_ones(
    tmp_path: Path, gpu: torch.device, name: str, shard: Shard | None
) -> None:
    save_quantized(tmp_path, name, **(CHECKPOINTS["gpt-oss"] if name == "mxfp4" else {}))
    stream = torch.cuda.Stream(gpu)
    with torch.inference_mode(), torch.cuda.stream(stream):
        checkpoint = resolve(str(tmp_path / "quantized"))
        matrices = []
        for device in (gpu, torch.device("cpu")):
            with open_weights(
                checkpoint, load_format="auto", dtype=torch.bfloat16, device=device, shard=shard
            ) as weights:
                layers = [weights.layer(index) for index in range(weights.config.n_layers)]
            matrices.append(
                [matrix for one in layers for matrix in (one.mixer.query_key_value.weight, one.output.weight)]
            )
        assert all(torch.equal(one.cpu(), other) for one, other in zip(*matrices, strict=True))


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_experts_are_read_into_their_places(tmp_path: Path, gpu: torch.device, name: str) -> None:
    save_checkpoint(tmp_path, **CHECKPOINTS[name])
    checkpoint = resolve(str(tmp_path))

    def experts(device: torch.device) -> list[Tensor]:
        with open_weights(checkpoint, load_format="auto", dtype=torch.bfloat16, device=device) as weights:
            mixture = weights.layer(0).mlp
        assert isinstance(mixture, ExpertsWeights)
        biases = [part.bias for part in (mixture.gate_up, mixture.down) if part.bias is not None]
        return [mixture.router.weight, mixture.gate_up.weight, mixture.down.weight, *biases]

    stream = torch.cuda.Stream(gpu)
    with torch.inference_mode(), torch.cuda.stream(stream):
        for found, expected in zip(experts(gpu), experts(torch.device("cpu")), strict=True):
            assert torch.equal(found.cpu(), expected)


def test_no_tensor_is_held_twice(checkpoint: Checkpoint, gpu: torch.device) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with open_weights(checkpoint, load_format="auto", dtype=torch.bfloat16, device=gpu) as weights:
        found = list(tensors_of(weights))
        n_bytes = weights.n_bytes
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    assert sum(storages.values()) == n_bytes
    # Eight threads convert a chunk each at a time; the allocator rounds up to 1 MiB.
    slack = (len(found) << 20) + 8 * (16 << 20)
    assert torch.cuda.max_memory_allocated() - before <= n_bytes + slack


def test_a_file_that_ends_too_early(checkpoint: Checkpoint, gpu: torch.device) -> None:
    path = checkpoint.folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with (
        pytest.raises(CheckpointError, match="not a complete safetensors file"),
        open_weights(checkpoint, load_format="auto", dtype=torch.bfloat16, device=gpu),
    ):
        pass


def test_random_weights_are_generated_on_the_gpu(tmp_path: Path, gpu: torch.device) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = resolve(str(tmp_path), load_format="dummy")

    def make() -> list[Tensor]:
        with open_weights(checkpoint, load_format="dummy", dtype=torch.bfloat16, device=gpu) as weights:
            return list(tensors_of(weights))

    once, again = make(), make()
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    for tensor in once:
        if tensor.ndim == 1:
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            # Uniform, scaled so that the product with values of size 1 has size 1.
            assert tensor.float().std().item() * tensor.shape[1] ** 0.5 == pytest.approx(1.0, abs=0.02)
            assert tensor.abs().max().item() <= (3 / tensor.shape[1]) ** 0.5 * 1.01
    assert not torch.equal(once[0], once[1])


def test_this_machine_passes_the_checks() -> None:
    gpu = check_machine(inspect_machine())
    assert 0 < gpu.free_bytes < gpu.total_bytes
    assert gpu.name == torch.cuda.get_device_name()


def test_allocated_memory_counts_as_used(gpu: torch.device) -> None:
    torch.cuda.empty_cache()
    before = measure_memory(gpu, later_bytes=5)
    taken = torch.empty(1 << 30, dtype=torch.uint8, device=gpu)
    after = measure_memory(gpu)
    assert before.later_bytes == 5
    assert before.free_bytes - after.free_bytes == taken.nbytes
    assert before.total_bytes == after.total_bytes
