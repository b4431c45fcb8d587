"""The decoder over CUDA's operations in float32, whole and in pieces, against Transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, integers, on_kernels
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.page_shape import PageShape
from radixkv.runtime.device.model.decoder import Decoder, OutputTokens
from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.weights.weights import open_weights
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, load_oracle, random_ids
from support.poison import poison
from support.reference_attention import ReferenceAttention

pytestmark = on_kernels

N_TOKENS = 37
PAGE_SIZE = 16
TABLE = (4, 1, 3)
DENSE = ("llama3", "biased", "qwen2", "qwen3", "mistral", "gemma3", "opt")
KINDS = (*DENSE, "mixtral", "qwen3-moe", "qwen3-moe-alternating", "gpt-oss")
"""Checkpoints that together cover biases, norms, windows, activations, positions, tied heads, experts and sinks."""
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "word_embed_proj_dim": 64}
"""Triton wants powers of two."""


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    save_checkpoint(tmp_path / "model", **CHECKPOINTS[request.param] | SIZES)
    return resolve(str(tmp_path / "model"))


class World:
    """One sequence in a pool, and the decoder that computes it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        device = torch.device(DEVICE)
        self.ids = random_ids(N_TOKENS, 1)
        with torch.inference_mode():
            with open_weights(checkpoint, load_format="auto", dtype=torch.float32, device=device) as weights:
                config = weights.config
                self.decoder = Decoder(weights, CudaOperations(config, 64, device))
            page = PageShape(config.n_layers, config.n_kv_heads, PAGE_SIZE, config.head_dim, torch.float32)
            self.pool = CudaPool(page, 5, device)
            poison(self.pool, range(5))
        sizes = config.n_heads, config.n_kv_heads, config.head_dim
        shape = AttentionShape(*sizes, PAGE_SIZE, torch.float32, config.attention_scale, torch.float32)
        self._attention = ReferenceAttention(shape, config.windows, device=device, sinks=self.decoder.sinks)
        self._attention._tables = integers([TABLE])
        positions = np.arange(N_TOKENS)
        slots = np.array(TABLE)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        self.inputs = TokenInputs(integers(self.ids), integers(positions), integers(slots))

    def attention(self, start: int = 0) -> LayerAttention:
        return self._attention.step(
            None, self._attention.plan_prompts(*np.array([[0], [start], [N_TOKENS - start]], np.int32))
        )

    def check(self, hidden: Tensor, expected: Tensor) -> None:
        logits = self.decoder.logits(hidden).cpu()
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(self.decoder.logits(hidden, self.decoder.empty_logits(len(hidden))).cpu(), logits)


def test_the_decoder_agrees_with_transformers(checkpoint: Checkpoint) -> None:
    world = World(checkpoint)
    with torch.inference_mode():
        expected = load_oracle(checkpoint)(torch.tensor([world.ids])).logits[0]
        world.check(world.decoder(world.inputs, world.pool, world.attention()), expected)
        last = OutputTokens(integers([N_TOKENS - 1]), lambda: world.attention(N_TOKENS - 1))
        world.check(world.decoder(world.inputs, world.pool, world.attention(), last), expected[-1:])
        padded = OutputTokens(integers([N_TOKENS - 1, 0, 0]), last.attention)
        world.check(world.decoder(world.inputs, world.pool, world.attention(), padded)[:1], expected[-1:])


def test_pieces_give_the_bits_of_a_whole_step(checkpoint: Checkpoint) -> None:
    world = World(checkpoint)
    with torch.inference_mode():
        whole = world.decoder(world.inputs, world.pool, world.attention())
        activations, attention = world.decoder.empty_activations(N_TOKENS), world.attention()
        world.decoder.run_before_first_attention(activations, world.inputs, world.pool)
        for index in range(world.decoder.n_attentions - 1):
            attention.run(index, activations.q, *world.pool.layers[index], activations.attention_out)
            world.decoder.run_between_attentions(index, activations, world.inputs, world.pool)
        assert torch.equal(world.decoder.run_from_last_attention(activations, world.pool, attention), whole)
