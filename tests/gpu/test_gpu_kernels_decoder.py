"""The decoder over CUDA's operations in float32, whole and in pieces, against Transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, integers, on_kernels
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.attention.base import LayerAttention
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
from radixkv.runtime.device.weights.open import open_weights
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, random_ids
from support.late_tensors import LateTensors
from support.poison import poison
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

    def __init__(self, checkpoint: Checkpoint, decorate: Decorate = lambda operations, _: operations) -> None:
        """``decorate`` returns the operations of the decoder."""
        device = torch.device(DEVICE)
        with torch.inference_mode():
            with open_weights(checkpoint, load_format="auto", dtype=torch.float32, device=device) as weights:
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
        arrays = [np.array([n], np.int32) for n in (0, 0, self.n_tokens, *[0] * 6)]
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
    world = World(checkpoint)
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
