"""The decoders of two ranks with adapters, with the kernels that add and sum them, against merged models."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, integers, on_kernels
from test_gpu_kernels_rank_decoders import (
    N_RANKS,
    PAGE_SIZE,
    SIZES,
    STATE_SIZES,
    TABLE,
    ThreadSums,
    Turns,
)
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.cuda.blocks import StepAdapters
from radixkv.runtime.device.adapters.cuda.loaded import CudaAdapters
from radixkv.runtime.device.adapters.cuda.memory import AdapterMemory
from radixkv.runtime.device.adapters.cuda.operations import CudaLoraOperations
from radixkv.runtime.device.adapters.targets import target_shapes
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingLayout
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.base import BlockArrays, DeviceSequences, TokenInputs
from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_arrays
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.ops.cuda.summed import CudaSummed, CudaSummedExperts
from radixkv.runtime.device.ops.summed import SummedOperations
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shards import Shard
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, random_ids
from support.lora import linear_modules, merge, put_in_slot, save_adapter
from support.reference_attention import reference_attention

pytestmark = on_kernels
MODELS = ("grouped", "qwen3-moe", "gemma4-shared", "qwen3.5")
RANK, N_TOKENS = 5, 11
"""Of the adapters, which divides nothing, and of the prompt."""


class RankDecoder:
    """The decoder of a rank, with adapters in slots, and without.

    Args:
        checkpoint: the model.
        folders: of the adapters.
        rank: which rank it is.
        turns: of all ranks.
    """

    def __init__(self, checkpoint: Checkpoint, folders: Sequence[Path], rank: int, turns: Turns) -> None:
        self._device, self._turns = torch.device(DEVICE), turns
        shard = Shard(rank, N_RANKS)
        self._sums = cast(CudaCollectives, ThreadSums(rank, turns))
        base = BaseModel.of_checkpoint(checkpoint, shard)
        with open_weights(
            checkpoint, load_format="auto", dtype=torch.float32, device=self._device, shard=shard
        ) as weights:
            self._config = config = weights.config
            n_slots = len(folders)
            memory = AdapterMemory(n_slots, RANK, torch.float32, self._device)
            self._adapters = CudaAdapters(memory, base, max_rank=RANK, stream=None)
            self._step = StepAdapters(
                self._adapters.slots, max_tokens=128, max_rows=8, n_slots=n_slots, device=self._device
            )
            operations = CudaOperations(config, 128, self._device)
            adapted = CudaLoraOperations(operations, config.activation, target_shapes(config), memory, self._step)
            self._plain, self._adapted = (
                Decoder(
                    weights,
                    SummedOperations(
                        one, partial(CudaSummed, self._sums), partial(CudaSummedExperts, self._sums), one.head
                    ),
                )
                for one in (operations, adapted)
            )
        memory.allocate()
        for folder in folders:
            prepared = self._adapters.prepare(base.matrices(AdapterFolder.open(folder, max_rank=RANK)))
            put_in_slot(self._adapters, prepared)

    def logits(self, ids: list[int], adapter: int | None, *, is_adapted: bool = True) -> Tensor:
        """Returns the logits of a prompt's tokens, [tokens, vocab].

        Args:
            ids: of the tokens.
            adapter: index of their adapter; None: they have none.
            is_adapted: whether the decoder has adapters.
        """
        config, n_tokens = self._config, len(ids)
        states = None
        if config.recurrent is not None:
            states = CudaStates(config.recurrent, 1, 0, torch.float32, self._device)
        decoder = self._adapted if is_adapted else self._plain
        pool = CudaPool(PageLayout.of(config, PAGE_SIZE, torch.float32), len(TABLE), self._device, states)
        planner = reference_attention(config, PAGE_SIZE, self._device, sinks=decoder.sinks)
        planner.connect(Staging(StagingLayout(), self._device), integers([TABLE]))
        positions = np.arange(n_tokens)
        slots = np.array(TABLE)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        arrays = [np.array([n], np.int32) for n in (0, 0, n_tokens, *[0] * 7)]
        rows, blocks = map(integers, block_arrays(RowArrays(*arrays), 0, [], 1))
        inputs = TokenInputs(
            *map(integers, (ids, positions, slots)),
            DeviceSequences(1, integers([]), integers([]), BlockArrays(rows, blocks)),
        )
        prompts = planner.plan_prompts(*np.array([[0], [0], [n_tokens]], np.int32))
        if adapter is None:
            self._step.plan(None, 0)
        else:
            slot = list(self._adapters.slots.values())[adapter]
            self._step.plan(np.full(n_tokens, slot, np.int32), n_tokens)
        hidden = decoder(inputs, pool, planner.step(None, prompts))
        return decoder.logits(hidden).cpu()


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_agree_with_merged_models(name: str, tmp_path: Path) -> None:
    """One of the models also computes without adapters, and with one of some modules."""
    changes = HYBRIDS[name] | STATE_SIZES if name in HYBRIDS else CHECKPOINTS[name]
    save_checkpoint(tmp_path / "base", **changes | SIZES)
    checkpoint, ids = resolve(str(tmp_path / "base")), random_ids(N_TOKENS, 1)
    oracle = load_oracle(checkpoint)
    every = linear_modules(oracle)
    folders = [
        save_adapter(tmp_path / "sql", oracle, every, seed=2, rank=RANK),
        save_adapter(tmp_path / "law", oracle, every[1::2], seed=3, rank=3),
    ]
    cases = (0, 1, None) if name == MODELS[0] else (0,)
    turns = Turns(SIZES["hidden_size"])

    def of_rank(rank: int) -> list[Tensor]:
        with turns.of_one(), torch.inference_mode():
            decoder = RankDecoder(checkpoint, folders, rank, turns)
            found = [decoder.logits(ids, adapter) for adapter in cases]
            if None in cases:
                assert torch.equal(found[-1], decoder.logits(ids, None, is_adapted=False)), "to the bit"
            return found

    with ThreadPoolExecutor(N_RANKS) as threads:
        first, second = threads.map(of_rank, range(N_RANKS))
    tolerance = 2e-3 if name in HYBRIDS else 5e-4
    with torch.inference_mode():
        base = oracle(torch.tensor([ids])).logits[0]
        for adapter, found, other in zip(cases, first, second, strict=True):
            assert torch.equal(found, other)
            expected = base
            if adapter is not None:
                expected = merge(load_oracle(checkpoint), folders[adapter])(torch.tensor([ids])).logits[0]
                assert (expected - base).abs().max() > 0.05, "the adapter changes something"
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
