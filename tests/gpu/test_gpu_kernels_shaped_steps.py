"""Steps of small Gemma 4 models through the GPU's runner and Triton's attention, in float32, against Transformers.

Triton's interpreter computes them: a graph is then what it captured, run again over what was staged last.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_support import DEVICE, on_kernels
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.shaped import ShapedAttention, open_attention
from radixkv.runtime.device.collectives import OneRank
from radixkv.runtime.device.cuda import persistent_batch
from radixkv.runtime.device.cuda.model_runner import ModelRunner
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.graphs import decode as decode_graphs
from radixkv.runtime.device.graphs import piecewise as piecewise_graphs
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.pack import PackedStep, Packer
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.step.plan import Row, StepPlan
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, GREEDY, load_oracle, random_ids, tokens_of
from support.poison import poison

pytestmark = [*on_kernels, pytest.mark.skipif(DEVICE == "cuda", reason="its graphs and streams are not real ones")]

PAGE_SIZE, MAX_ROWS, N_PAGES, N_TOKENS = 16, 2, 24, 60
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 32}


class World:
    """A runner over a small model, two sequences, and Transformers' logits of both."""

    def __init__(self, checkpoint: Checkpoint, *, has_graphs: bool) -> None:
        device = torch.device(DEVICE)
        settings = DeviceSettings(
            page_size=PAGE_SIZE,
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=64,
            max_model_len=64,
            enforce_eager=not has_graphs,
        )
        with torch.inference_mode():
            with open_weights(checkpoint, load_format="auto", dtype=torch.float32, device=device) as weights:
                config = weights.config
                decoder = Decoder(weights, CudaOperations(config, 64, device))
            layout = StagingLayout()
            attention = open_attention(
                [
                    AttentionShape(
                        config.n_heads,
                        config.heads[layer].n_kv_heads,
                        config.heads[layer].head_dim,
                        PAGE_SIZE,
                        torch.float32,
                        config.attention_scale,
                        torch.float32,
                    )
                    for layer in config.attention_layers
                ],
                config.windows_within(64),
                max_rows=MAX_ROWS,
                layout=layout,
                device=device,
                prefill_kernel="triton",
            )
            assert isinstance(attention, ShapedAttention)
            stream: Any = SimpleNamespace(device=device, synchronize=lambda: None)
            self.runner = ModelRunner(decoder, attention, layout, settings, stream, OneRank())
            self.runner.open_pool(PageLayout.of(config, PAGE_SIZE, torch.float32), N_PAGES)
            assert len(self.runner.pool.parts) == 2
            poison(self.runner.pool, range(N_PAGES))
            self.runner.capture(self.runner.decode_sizes)
            self.runner.capture_piecewise(self.runner.piecewise_sizes[:1])
        self.packer = Packer(settings, N_PAGES, 64, count_split=self.runner.count_split)
        self.ids = [random_ids(N_TOKENS, seed) for seed in (1, 2)]
        self.expected: Tensor = load_oracle(checkpoint)(torch.tensor(self.ids)).logits
        self.replayed: list[tuple[int, object]] = []

    def row(self, batch_slot: int, sequence: int, start: int, stop: int) -> Row:
        """Returns a row that computes a part of a sequence over its pages, which all slots share."""
        n_pages = -(-N_TOKENS // PAGE_SIZE)
        return Row(
            batch_slot=batch_slot,
            start=start,
            n_tokens=stop - start,
            tokens=tokens_of(self.ids[sequence][start:stop]),
            write_start=start,
            table_start=0,
            table_pages=tuple(range(sequence * n_pages, (sequence + 1) * n_pages)),
            sampling=GREEDY,
        )

    def run(self, *rows: tuple[int, int, int, int], n_decode: int = 0) -> None:
        """Runs a step, and checks the logits of each row's last token."""
        step = self.packer.pack(StepPlan(0, tuple(self.row(*row) for row in rows), n_decode=n_decode))
        with torch.inference_mode():
            logits = self.runner.enqueue(step).logits
        lasts = list(range(len(rows))) if step.results is None else step.results.tolist()
        expected = torch.stack([self.expected[sequence, stop - 1] for _, sequence, _, stop in rows])
        difference = (logits[lasts].cpu() - expected).abs()
        assert difference.max() < 2e-4, f"{rows}: off by {difference.amax(-1).tolist()}"


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces what the interpreter lacks: a GPU's sizes, pinned memory, streams and graphs."""
    gpu = SimpleNamespace(major=8, minor=9, multi_processor_count=2, shared_memory_per_multiprocessor=102_400)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(Staging, "stage", lambda self: StagingBuffer(torch.empty(self._size, dtype=torch.int32)))
    monkeypatch.setattr(CudaPool, "copy", lambda self, pairs: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for module in (decode_graphs, piecewise_graphs):
        monkeypatch.setattr(module, "capture_graph", lambda body, stream, memory: SimpleNamespace(replay=body))


@pytest.mark.usefixtures("without_a_gpu")
@pytest.mark.parametrize(
    ("name", "has_graphs"),
    [("gemma4", True), ("gemma4-shared", True), ("gemma4-shared", False), ("gemma4-moe", False)],
)
def test_prompts_and_answers_agree_with_transformers(name: str, has_graphs: bool, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **CHECKPOINTS[name] | SIZES)
    world = World(resolve(str(tmp_path)), has_graphs=has_graphs)
    assert bool(world.runner.piecewise_sizes) == has_graphs
    world.run((0, 0, 0, 37), (1, 1, 0, 20))  # longer than the piecewise graph
    world.run((0, 0, 37, 38), (1, 1, 20, 34), n_decode=1)  # within it; the prompt begins behind a window
    world.run((0, 0, 38, 39), (1, 1, 34, 35), n_decode=2)
    world.run((1, 1, 35, 36), n_decode=1)
    world.run((0, 0, 39, 41))  # two tokens of a prompt, which fit a decode graph
    world.run((1, 0, 32, 60))  # another request on a hit


@pytest.mark.usefixtures("without_a_gpu")
def test_graphs_run_behind_more_table_updates_than_are_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, **CHECKPOINTS["gemma4"] | SIZES)
    monkeypatch.setattr(persistent_batch, "_UPDATES_A_ROW", 2)
    world = World(resolve(str(tmp_path)), has_graphs=True)
    replay, n_staged = world.runner._replay, []

    def counted(step: PackedStep, *others: Any) -> Any:
        n_staged.append(len(step.updates))
        return replay(step, *others)

    monkeypatch.setattr(world.runner, "_replay", counted)
    world.run((0, 0, 0, 37))
    world.run((1, 1, 0, 34))
    world.run((0, 1, 34, 35), (1, 0, 37, 38), n_decode=2)  # each goes on in the other's batch slot
    world.run((0, 0, 38, 40))  # a prompt that fits a decode graph: its updates are staged
    world.run((1, 1, 35, 36), (0, 0, 40, 41), n_decode=2)
    assert n_staged == [8, 4, 8], "not all of these steps were replayed"
