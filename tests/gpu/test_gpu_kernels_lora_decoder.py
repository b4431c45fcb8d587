"""The decoder with adapters over CUDA's operations in float32, against merged models of Transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, integers, normal, on_kernels
from test_gpu_kernels_decoder import SIZES, STATE_SIZES, World
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.runtime.adapters.loading import LoadableAdapters
from radixkv.runtime.adapters.slots import AdapterSlots
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.cuda.blocks import StepAdapters
from radixkv.runtime.device.adapters.cuda.layers import LoraLinear
from radixkv.runtime.device.adapters.cuda.loaded import CudaAdapters
from radixkv.runtime.device.adapters.cuda.memory import AdapterMemory
from radixkv.runtime.device.adapters.cuda.operations import CudaLoraOperations
from radixkv.runtime.device.adapters.targets import target_shapes
from radixkv.runtime.device.model.decoder import OutputTokens
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops.base import Fp8Rows, Operations, Rows, RowScales, as_tensor
from radixkv.runtime.device.ops.cuda.fp8_rows import quantize_rows
from radixkv.runtime.device.ops.cuda.layers import CudaLinear, Mlp
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices
from radixkv.runtime.device.weights.fp8_matrix import BLOCK
from radixkv.runtime.device.weights.layer_weights import NormWeights
from radixkv.runtime.finished import wait_readable
from radixkv.runtime.request import ActiveAdapter, Request
from radixkv.runtime.scheduler.waiting import WaitingQueue
from radixkv.tree.marks import Marks
from radixkv.tree.node import Namespace
from radixkv.wire.adapter_messages import AdapterLoaded, LoadAdapter
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle
from support.lora import linear_modules, merge, put_in_slot, save_adapter

pytestmark = on_kernels
KINDS = ("llama3", "gemma3", "opt", "mixtral", "qwen3.5")
"""Checkpoints that together have all kinds of products that adapters change, and all kinds of last mixers."""
N_SLOTS, RANK = 3, 5


class AdaptedWorld(World):
    """A world whose decoder has the adapters of ``folders`` in slots."""

    def __init__(self, checkpoint: Checkpoint, *folders: Path) -> None:
        super().__init__(checkpoint, self._with_adapters)
        self.memory.allocate()
        for folder in folders:
            self.put(folder)

    def opened(self, folder: Path) -> AdapterMatrices:
        return self.base.matrices(AdapterFolder.open(folder, max_rank=RANK))

    def put(self, folder: Path) -> str:
        """Loads an adapter into a free slot; returns its digest."""
        return put_in_slot(self.adapters, self.adapters.prepare(self.opened(folder)))

    def _with_adapters(self, operations: CudaOperations, config: DecoderConfig) -> Operations:
        device, dtype = torch.device(DEVICE), torch.float32
        self.base = BaseModel.of(config)
        self.memory = AdapterMemory(N_SLOTS, RANK, dtype, device)
        self.adapters = CudaAdapters(self.memory, self.base, max_rank=RANK, stream=None)
        self.step = StepAdapters(self.adapters.slots, max_tokens=128, max_rows=8, n_slots=N_SLOTS, device=device)
        self.operations = CudaLoraOperations(
            operations, config.activation, target_shapes(config), self.memory, self.step
        )
        return self.operations

    def plan(self, digest: str | None, outputs: list[int] | None = None) -> None:
        """Plans a step whose tokens all have one adapter, or none."""
        slots = np.full(self.n_tokens, -1 if digest is None else self.adapters.slots[digest], np.int32)
        self.step.plan(slots, self.n_tokens, None if outputs is None else np.array(outputs, np.int32))


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    changes = HYBRIDS[request.param] | STATE_SIZES if request.param in HYBRIDS else CHECKPOINTS[request.param]
    save_checkpoint(tmp_path / "model", **changes | SIZES)
    return resolve(str(tmp_path / "model"))


def test_the_decoder_agrees_with_merged_models(checkpoint: Checkpoint, tmp_path: Path) -> None:
    oracle = load_oracle(checkpoint)
    every = linear_modules(oracle)
    sql = save_adapter(tmp_path / "sql", oracle, every, seed=2)
    law = save_adapter(tmp_path / "law", oracle, every[1::2], seed=3, rank=RANK)
    world = AdaptedWorld(checkpoint, sql, law)
    last = world.n_tokens - 1
    with torch.inference_mode():
        plain = World(checkpoint)
        expected = oracle(torch.tensor([world.ids])).logits[0]
        hidden = world.decoder(world.inputs, world.pool, world.attention())
        assert torch.equal(hidden, plain.decoder(plain.inputs, plain.pool, plain.attention()))
        world.plan(None)
        world.check(world.decoder(world.inputs, world.pool, world.attention()), expected)
        for folder in (law, sql):
            merged = merge(load_oracle(checkpoint), folder)(torch.tensor([world.ids])).logits[0]
            assert (merged - expected).abs().max() > 0.05, "the adapter changes something"
            world.plan(world.opened(folder).digest, [last, 0, 0])
            outputs = OutputTokens(integers([last, 0, 0]), lambda: world.attention(last), world.step.select_outputs)
            hidden = world.decoder(world.inputs, world.pool, world.attention(), outputs)
            world.check(hidden[:1], merged[-1:])
            world.plan(world.opened(folder).digest)
            world.check(world.decoder(world.inputs, world.pool, world.attention()), merged)
        world.step.plan(None, 0)
        world.check(world.decoder(world.inputs, world.pool, world.attention()), expected)


@pytest.mark.parametrize("checkpoint", ["llama3"], indirect=True)
def test_adapters_take_turns_in_slots(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Host memory keeps those that have lost their slot; copies that nobody waits for take none."""
    oracle = load_oracle(checkpoint)
    modules = linear_modules(oracle)
    folders = [
        save_adapter(tmp_path / str(seed), oracle, modules[seed::2], seed=seed, rank=2 + seed) for seed in range(3)
    ]
    merged = [merge(load_oracle(checkpoint), folder) for folder in folders]
    world = AdaptedWorld(checkpoint, *folders[:2])
    adapters = world.adapters
    digests = [world.opened(folder).digest for folder in folders]
    for folder in folders[2:]:
        adapters.prepare(world.opened(folder)).discard()
        adapters.prepare(world.opened(folder)).put()
    n_bytes = [AdapterFolder.open(folder, max_rank=RANK).n_bytes for folder in folders]
    assert list(adapters.sizes.items()) == list(zip(digests, n_bytes, strict=True)), "host memory of the files"
    shutil.rmtree(folders[2])

    def check(*in_slots: int) -> None:
        assert adapters.slots.keys() == {digests[index] for index in in_slots}
        assert len(set(adapters.slots.values())) == len(in_slots)
        with torch.inference_mode():
            for index in in_slots:
                world.plan(digests[index])
                expected = merged[index](torch.tensor([world.ids])).logits[0]
                world.check(world.decoder(world.inputs, world.pool, world.attention()), expected)

    in_slots = [0, 1]
    for index in (2, 0):
        copy = adapters.copy(digests[index])  # into the third slot, while the two others can be in use
        copy.fill()
        check(*in_slots)
        adapters.withdraw(digests[in_slots.pop(0)])
        copy.put()
        in_slots.append(index)
        unused = adapters.copy(digests[1])
        unused.fill()
        unused.discard()
    check(2, 0)
    adapters.remove(digests[1])
    assert list(adapters.sizes) == [digests[0], digests[2]]


@pytest.mark.parametrize("checkpoint", ["llama3"], indirect=True)
def test_a_loop_copies_adapters_into_slots(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Both get the one slot in turn."""
    oracle = load_oracle(checkpoint)
    modules = linear_modules(oracle)
    folders = [save_adapter(tmp_path / name, oracle, modules, seed=seed) for seed, name in enumerate("ab")]
    world = AdaptedWorld(checkpoint)
    slots = AdapterSlots(world.adapters, N_SLOTS - 2)
    adapters = LoadableAdapters(world.adapters, slots=slots, marks=Marks())
    queue = slots.open_queue(WaitingQueue(PageCache(8, 4), policy="fcfs", window=8, max_passes=8))
    for folder in folders:
        assert adapters.receive(LoadAdapter(folder.name, folder.name, str(folder))) == []
        wait_readable(adapters.descriptors(), None)
        (reply,) = adapters.advance(lambda digest: False)
        assert isinstance(reply, AdapterLoaded)
    assert not world.adapters.slots
    for number, folder in enumerate([*folders, folders[0]]):
        digest = world.opened(folder).digest
        active = ActiveAdapter(digest)
        request = Request(str(number), Namespace(), bytearray(4), 1, 1, adapter=active, order=(0, number))
        queue.add(request)
        assert request not in set(queue)
        adapters.advance(lambda digest: True)
        wait_readable(adapters.descriptors(), None)
        adapters.advance(lambda digest: True)
        assert list(queue) == [request]
        assert world.adapters.slots.keys() == {digest}
        with torch.inference_mode():
            merged = merge(load_oracle(checkpoint), folder)(torch.tensor([world.ids])).logits[0]
            world.plan(digest)
            world.check(world.decoder(world.inputs, world.pool, world.attention()), merged)
        queue.remove(request)
    adapters.close()


class Rounded(CudaLinear):
    """A product of rows in FP8, in torch: the interpreter has no FP8 products."""

    def __init__(self, weight: Tensor, scales: RowScales) -> None:
        self.weight, self.scales = weight, scales
        self.read: list[Rows] = []

    @property
    def input_scales(self) -> RowScales:
        return self.scales

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        self.read.append(x)
        rows = quantize_rows(x, self.scales) if isinstance(x, Tensor) else x
        n_in = rows.values.shape[1]
        scales = rows.scales.repeat_interleave(n_in if self.scales == "rows" else BLOCK, 1)[:, :n_in]
        values = (rows.values.float() * scales)[: rows.n_rows]
        return (values @ self.weight.t()).to(rows.dtype)


@pytest.mark.parametrize("checkpoint", ["llama3"], indirect=True)
@pytest.mark.parametrize("scales", ["rows", "groups"])
@torch.inference_mode()
def test_norms_write_fp8_for_the_model_and_what_adapters_read(
    checkpoint: Checkpoint, tmp_path: Path, scales: RowScales
) -> None:
    """A product and an adapter have the bits of rows that the product rounds itself."""
    oracle = load_oracle(checkpoint)
    folder = save_adapter(tmp_path / "sql", oracle, linear_modules(oracle), seed=2)
    world = AdaptedWorld(checkpoint, folder)
    slots = world.memory._products[0]
    base = Rounded(normal(slots.n_out, slots.n_in, dtype=torch.float32), scales)
    product = LoraLinear(base, slots, world.step)
    weights = NormWeights(normal(slots.n_in, dtype=torch.float32))
    x, residual = (normal(world.n_tokens, slots.n_in, dtype=torch.float32) for _ in range(2))
    for reader in (product, Mlp(product, product, "silu")):
        norm = world.operations.norm(weights, reader)
        plain = as_tensor(world.operations.norm(weights).add(x, residual.clone()))
        world.step.plan(None, 0)
        rows = norm.add(x, residual.clone())
        assert isinstance(rows, Fp8Rows)
        assert rows.unrounded is None
        expected = product(plain)
        assert torch.equal(product(rows), expected)
        world.plan(world.opened(folder).digest)
        adapted = norm.add(x, residual.clone())
        assert isinstance(adapted, Fp8Rows)
        assert torch.equal(as_tensor(adapted), plain)
        found = product(adapted)
        assert base.read[-1] is adapted, "the product reads FP8"
        assert torch.equal(found, product(plain))
        assert (found - expected).abs().max() > 0.01, "the adapter changes something"
