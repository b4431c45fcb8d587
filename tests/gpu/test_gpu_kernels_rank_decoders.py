"""The decoders of two ranks over CUDA's operations in float32, with the kernel that sums, against Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Barrier, Lock
from typing import Any, cast

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, integers, on_kernels, poisoned
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingLayout
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.base import BlockArrays, DeviceSequences, RmsFields, Rows, TokenInputs
from radixkv.runtime.device.ops.cuda.collectives import CudaCollectives
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_arrays
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.ops.cuda.rank_sums import MAX_PROGRAMS, Meeting, sum_parts
from radixkv.runtime.device.ops.cuda.summed import CudaSummed, CudaSummedExperts
from radixkv.runtime.device.ops.summed import PartMemory, SummedOperations
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shards import Shard
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, random_ids
from support.reference_attention import reference_attention

pytestmark = on_kernels

N_RANKS = 2
PAGE_SIZE = 16
TABLE = (4, 1, 3, 0, 6, 2, 5)
MAX_TOKENS = 70
"""Of a model with states: more than a block of 64."""
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
"""Triton wants powers of two."""
STATE_SIZES = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "ssm_state_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": CHECKPOINTS["gpt-oss"],
    "gemma4-shared": CHECKPOINTS["gemma4-shared"],
    "gemma4-moe": CHECKPOINTS["gemma4-moe"] | {"global_head_dim": 32},
    "qwen3.5-moe": HYBRIDS["qwen3.5-moe"] | STATE_SIZES,
    "nemotron-h": HYBRIDS["nemotron-h"] | STATE_SIZES,
    "nemotron-h-moe": HYBRIDS["nemotron-h-moe"] | STATE_SIZES | {"n_group": 1, "topk_group": 1},
}


class Turns:
    """The memories of ranks for their parts, and turns: one thread computes at a time, up to its next sum."""

    def __init__(self, hidden_size: int) -> None:
        self.memories = [
            [poisoned(MAX_TOKENS, hidden_size, dtype=torch.float32) for _ in range(N_RANKS)] for _ in range(2)
        ]
        self._turn = Lock()
        self._barrier = Barrier(N_RANKS)

    @contextmanager
    def of_one(self) -> Iterator[None]:
        """Returns a block in which no other rank computes, but while this one waits."""
        with self._turn:
            yield

    def wait(self) -> None:
        """Waits until all ranks have come here."""
        self._turn.release()
        try:
            self._barrier.wait(60.0)
        finally:
            self._turn.acquire()


class ThreadSums:
    """The sums of ``CudaCollectives`` for a rank in a thread, by the same kernel.

    A rank goes on to its next part while the other may not have begun to add: as on GPUs it must not write to the
    same memory.
    """

    def __init__(self, rank: int, turns: Turns) -> None:
        self._rank = rank
        self._turns = turns
        # To each meeting the other rank has come, because the threads wait for each other.
        self._flags = [torch.zeros(N_RANKS, MAX_PROGRAMS, dtype=torch.int32, device=DEVICE) for _ in range(N_RANKS)]
        counts = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=DEVICE)
        gives_up = torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE == "cuda")
        self._meeting = Meeting(rank, addresses(self._flags), counts, gives_up)

    def part(self, memory: PartMemory, n_rows: int) -> Tensor:
        return self._turns.memories[memory][self._rank][:n_rows]

    def sum_parts(
        self, memory: PartMemory, out: Rows, residual: Tensor | None = None, norm: RmsFields | None = None
    ) -> None:
        self._turns.wait()
        self._flags[self._rank].fill_(1)
        self._meeting.counts.zero_()
        sum_parts(addresses(self._turns.memories[memory]), self._meeting, out, residual, norm)


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([one.data_ptr() for one in tensors], device=DEVICE)


def logits_of(checkpoint: Checkpoint, ids: list[int], rank: int, turns: Turns) -> Tensor:
    """Returns the logits of a prompt's tokens, as a rank computes them."""
    device = torch.device(DEVICE)
    with turns.of_one(), torch.inference_mode():
        with open_weights(
            checkpoint, load_format="auto", dtype=torch.float32, device=device, shard=Shard(rank, N_RANKS)
        ) as weights:
            config = weights.config
            sums = cast(CudaCollectives, ThreadSums(rank, turns))
            operations = CudaOperations(config, 128, device)
            summed = SummedOperations(
                operations, partial(CudaSummed, sums), partial(CudaSummedExperts, sums), operations.head
            )
            decoder = Decoder(weights, summed)
        states = None
        if config.recurrent is not None:
            states = CudaStates(config.recurrent, 1, 0, torch.float32, device)
        pool = CudaPool(PageLayout.of(config, PAGE_SIZE, torch.float32), len(TABLE), device, states)
        planner = reference_attention(config, PAGE_SIZE, device, sinks=decoder.sinks)
        planner.connect(Staging(StagingLayout(), device), integers([TABLE]))
        positions = np.arange(n_tokens := len(ids))
        slots = np.array(TABLE)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        arrays = [np.array([n], np.int32) for n in (0, 0, n_tokens, *[0] * 7)]
        rows, blocks = map(integers, block_arrays(RowArrays(*arrays), 0, [], 1))
        inputs = TokenInputs(
            *map(integers, (ids, positions, slots)),
            DeviceSequences(1, integers([]), integers([]), BlockArrays(rows, blocks)),
        )
        prompts = planner.plan_prompts(*np.array([[0], [0], [n_tokens]], np.int32))
        hidden = decoder(inputs, pool, planner.step(None, prompts))
        return decoder.logits(hidden).cpu()


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_agree_with_transformers(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **MODELS[name] | SIZES)
    checkpoint, ids = resolve(str(tmp_path)), random_ids(MAX_TOKENS if name in HYBRIDS else 37, 1)
    turns = Turns(SIZES["hidden_size"])
    with ThreadPoolExecutor(N_RANKS) as threads:
        first, second = threads.map(lambda rank: logits_of(checkpoint, ids, rank, turns), range(N_RANKS))
    with torch.inference_mode():
        expected = load_oracle(checkpoint)(torch.tensor([ids])).logits[0]
    assert torch.equal(first, second)
    tolerance = 2e-3 if name in HYBRIDS else 5e-4  # blocks sum in another order than those of Transformers
    torch.testing.assert_close(first, expected, rtol=tolerance, atol=tolerance)
    assert (first - expected).abs().mean() < 2e-4
