"""The decoder over CUDA's operations in float32, whole and in pieces, against Transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, integers, on_kernels, round_to_fp8_exactly
from safetensors.torch import load_file
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.kv_dtype import FP8, FP8_MAX
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingLayout
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.model.decoder import Decoder, OutputTokens
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops.base import BlockArrays, DeviceSequences, Operations, TokenInputs
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_arrays
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.device.weights.fp8_matrix import BLOCK
from radixkv.runtime.device.weights.open import WeightProducts, open_weights
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, random_ids
from support.late_tensors import LateTensors
from support.poison import poison
from support.quantized_checkpoints import save_quantized
from support.reference_attention import reference_attention

pytestmark = on_kernels

PAGE_SIZE = 16
TABLE = (4, 1, 3, 0, 6, 2, 5)
DENSE = ("llama3", "biased", "qwen2", "qwen3", "mistral", "gemma3", "opt")
HYBRID = ("qwen3.5", "qwen3.5-alternating", "qwen3.5-moe", "qwen3-next", "nemotron-h", "nemotron-h-moe")
SHAPED = ("gemma4", "gemma4-shared", "gemma4-unified", "gemma4-moe")
KINDS = (*DENSE, "mixtral", "qwen3-moe", "qwen3-moe-alternating", "gpt-oss", *HYBRID, *SHAPED)
"""Checkpoints that together cover biases, norms, windows, activations, positions, tied heads, experts, sinks,
states, and heads of several shapes."""
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "word_embed_proj_dim": 64}
STATE_SIZES = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "ssm_state_size": 16}
"""Triton wants powers of two."""
ONE_GROUP = {"n_group": 1, "topk_group": 1}
"""Groups of experts are for the CPU only."""
FULL_SIZES = {"global_head_dim": 32}
FP8_SIZES: dict[str, dict[str, Any]] = {
    "qwen3.5": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
    "qwen3-next": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "mlp_only_layers": [0, 1],
    },
}
"""Blocks of 128 begin where stacked matrices do, and the parts of a key head."""
FP8_NOISE = 0.2 if DEVICE == "cuda" else 0.05
"""Relative error of logits: near the middle of two values of FP8 rounding goes either way. A GPU's products are
in 16 bits."""


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    changes = (
        HYBRIDS[request.param] | STATE_SIZES | ONE_GROUP if request.param in HYBRID else CHECKPOINTS[request.param]
    )
    if request.param in SHAPED:
        changes = changes | FULL_SIZES
    save_checkpoint(tmp_path / "model", **changes | SIZES)
    return resolve(str(tmp_path / "model"))


Decorate = Callable[[CudaOperations, DecoderConfig], Operations]


class World:
    """One sequence in a pool, and the decoder that computes it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        decorate: Decorate = lambda operations, _: operations,
        *,
        products: Collection[WeightProducts] = (),
    ) -> None:
        """``decorate`` returns the operations of the decoder."""
        device = torch.device(DEVICE)
        with torch.inference_mode():
            with open_weights(
                checkpoint, load_format="auto", dtype=torch.float32, device=device, products=products
            ) as weights:
                config, late = weights.config, LateTensors(weights.source)
                operations = decorate(CudaOperations(config, 128, device), config)
                self.decoder = Decoder(replace(weights, source=late), operations)
                late.load()
            states = None
            if config.recurrent is not None:
                states = CudaStates(config.recurrent, 1, 0, torch.float32, device)
            self.pool = CudaPool(PageLayout.of(config, PAGE_SIZE, torch.float32), len(TABLE), device, states)
            poison(self.pool, range(len(TABLE)))
        self.n_tokens = 37 if states is None else 70  # more than a block of 64
        self.ids = random_ids(self.n_tokens, 1)
        self._attention = reference_attention(config, PAGE_SIZE, device, sinks=self.decoder.sinks)
        self._attention.connect(Staging(StagingLayout(), device), integers([TABLE]))
        positions = np.arange(self.n_tokens)
        slots = np.array(TABLE)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        tokens = integers(self.ids), integers(positions), integers(slots)
        arrays = [np.array([n], np.int32) for n in (0, 0, self.n_tokens, *[0] * 7)]
        rows, blocks = map(integers, block_arrays(RowArrays(*arrays), 0, [], 1))
        no_rows = integers([])
        self.inputs = TokenInputs(*tokens, DeviceSequences(1, no_rows, no_rows, BlockArrays(rows, blocks)))

    def attention(self, start: int = 0) -> LayerAttention:
        return self._attention.step(
            None, self._attention.plan_prompts(*np.array([[0], [start], [self.n_tokens - start]], np.int32))
        )

    def check(self, hidden: Tensor, expected: Tensor) -> None:
        logits = self.decoder.logits(hidden).cpu()
        # Blocks of delta nets sum in another order than those of Transformers.
        tolerance = 1e-4 if not self.pool.states else 2e-3
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
        assert (logits - expected).abs().mean() < 2e-4
        assert torch.equal(self.decoder.logits(hidden, self.decoder.empty_logits(len(hidden))).cpu(), logits)


def test_the_decoder_agrees_with_transformers(checkpoint: Checkpoint) -> None:
    world = World(checkpoint)
    with torch.inference_mode():
        expected = load_oracle(checkpoint)(torch.tensor([world.ids])).logits[0]
        world.check(world.decoder(world.inputs, world.pool, world.attention()), expected)
        last = OutputTokens(integers([world.n_tokens - 1]), lambda: world.attention(world.n_tokens - 1))
        world.check(world.decoder(world.inputs, world.pool, world.attention(), last), expected[-1:])
        padded = OutputTokens(integers([world.n_tokens - 1, 0, 0]), last.attention)
        world.check(world.decoder(world.inputs, world.pool, world.attention(), padded)[:1], expected[-1:])


@pytest.mark.parametrize("checkpoint", ["opt", "nemotron-h"], indirect=True)
def test_models_without_a_rotary_embedding_need_no_memory_for_angles(checkpoint: Checkpoint) -> None:
    with open_weights(checkpoint, load_format="auto", dtype=torch.float32, device=torch.device(DEVICE)) as weights:
        CudaOperations(weights.config, 1 << 44, torch.device(DEVICE))


def test_pieces_give_the_bits_of_a_whole_step(checkpoint: Checkpoint) -> None:
    check_pieces(World(checkpoint))


@pytest.mark.parametrize("head_dim", [16, BLOCK])
@pytest.mark.parametrize("kind", FP8_SIZES)
def test_hybrids_in_fp8(kind: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle has the matrices that FP8 stands for, and rounds what they multiply.

    Queries, keys and values, with gates among the queries, are in FP8 if their heads are whole blocks.
    """
    if DEVICE == "cpu":
        round_to_fp8_exactly(monkeypatch)
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    heads = {"num_attention_heads": 256 // head_dim, "num_key_value_heads": 1, "head_dim": head_dim}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "linear_value_head_dim": 32} | heads
    save_quantized(tmp_path, "fp8 blocks 128", **(HYBRIDS[kind] | SIZES | layers | FP8_SIZES[kind] | sizes))
    world = World(resolve(str(tmp_path / "quantized")), products=["fp8"])
    oracle = load_oracle(resolve(str(tmp_path / "dense")))
    stored = load_file(tmp_path / "quantized" / "model.safetensors")
    dense = () if head_dim == BLOCK else ("q_proj", "k_proj", "v_proj")
    for name, module in oracle.named_modules():
        if f"{name}.weight_scale_inv" in stored and not name.endswith(dense):
            module.register_forward_pre_hook(lambda _, inputs: tuple(map(rounded_to_fp8, inputs)))
    with torch.inference_mode():
        expected = oracle(torch.tensor([world.ids])).logits[0]
        logits = world.decoder.logits(world.decoder(world.inputs, world.pool, world.attention())).cpu()
    difference = float((logits - expected).norm() / expected.norm())
    print(f"{kind}: off by {difference:.4f}")
    assert difference < FP8_NOISE
    check_pieces(world)


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Returns rows in FP8 with a scale for each 128 values."""
    groups = x.unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / FP8_MAX
    return ((groups / scales).to(FP8).float() * scales).flatten(-2)


def check_pieces(world: World) -> None:
    with torch.inference_mode():
        whole = world.decoder(world.inputs, world.pool, world.attention())
        activations, attention = world.decoder.empty_activations(world.n_tokens), world.attention()
        # As graphs do, which know no rows: only what is between them gets these.
        inputs, rows = replace(world.inputs, sequences=()), world.inputs.sequences
        world.decoder.run_before_first_mixer(activations, inputs, world.pool)
        for index in range(world.decoder.n_mixers - 1):
            world.decoder.mix(index, activations, world.pool, attention, rows)
            world.decoder.run_between_mixers(index, activations, inputs, world.pool)
        assert torch.equal(world.decoder.run_from_last_mixer(activations, world.pool, attention, rows), whole)
