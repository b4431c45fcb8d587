"""Steps with adapters through the GPU's runner, in float32, against merged models of Transformers.

Triton's interpreter computes them: a graph is then what it captured, run again over what was staged last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_support import DEVICE, on_kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.cuda.opened import OpenedAdapters
from radixkv.runtime.device.adapters.sources import open_adapter
from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.shaped import open_attention
from radixkv.runtime.device.collectives import OneRank
from radixkv.runtime.device.cuda.model_runner import ModelRunner
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.graphs import decode as decode_graphs
from radixkv.runtime.device.graphs import piecewise as piecewise_graphs
from radixkv.runtime.device.graphs.memory_size import KERNELS_OF_ADAPTERS
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.pack import Packer
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.step.plan import Row, StepPlan
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, GREEDY, load_oracle, random_ids, tokens_of
from support.lora import linear_modules, merge, put_in_slot, save_adapter
from support.poison import poison

pytestmark = [*on_kernels, pytest.mark.skipif(DEVICE == "cuda", reason="its graphs and streams are not real ones")]

PAGE_SIZE, MAX_ROWS, N_PAGES, N_TOKENS, RANK = 16, 4, 24, 60, 6
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
Adapted = Callable[[int], str]


class World:
    """A runner over a small model with two adapters, and a sequence of the model alone and of each adapter."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, *, has_graphs: bool) -> None:
        device, oracle = torch.device(DEVICE), load_oracle(checkpoint)
        modules = linear_modules(oracle)
        folders = [
            save_adapter(folder / "sql", oracle, modules, seed=2),
            save_adapter(folder / "law", oracle, modules[::2], seed=3, rank=RANK),
        ]
        settings = DeviceSettings(
            page_size=PAGE_SIZE,
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=64,
            max_model_len=64,
            enforce_eager=not has_graphs,
            has_adapters=True,
            max_lora_rank=RANK,
            max_loras=2,
        )
        stream: Any = SimpleNamespace(device=device, synchronize=lambda: None)
        with torch.inference_mode():
            with open_weights(checkpoint, load_format="auto", dtype=torch.float32, device=device) as weights:
                config = weights.config
                base = BaseModel.of(config)
                opened = OpenedAdapters(settings, base, CudaOperations(config, 64, device), torch.float32, stream)
                decoder = Decoder(weights, opened.operations)
            opened.load()
            layout, heads = StagingLayout(), config.heads[config.attention_layers[0]]
            shape = AttentionShape(
                config.n_heads,
                heads.n_kv_heads,
                heads.head_dim,
                PAGE_SIZE,
                torch.float32,
                config.attention_scale,
                torch.float32,
            )
            attention = open_attention(
                [shape] * len(config.attention_layers),
                config.windows_within(64),
                max_rows=MAX_ROWS,
                layout=layout,
                device=device,
                prefill_kernel="triton",
            )
            self.adapters, self.step = opened.adapters, opened.step
            self.decoder, self.n_products = decoder, opened.n_products
            self.runner = ModelRunner(decoder, attention, layout, settings, stream, OneRank(), None, opened.step)
            self.runner.open_pool(PageLayout.of(config, PAGE_SIZE, torch.float32), N_PAGES)
            poison(self.runner.pool, range(N_PAGES))
            assert self.runner.measure_largest() == 0
        self.digests = [""]
        for one in folders:  # loaded before graphs are captured, and after
            prepared = self.adapters.prepare(open_adapter("one", str(one), RANK, base))
            self.digests.append(put_in_slot(self.adapters, prepared))
            with torch.inference_mode():
                self.runner.capture(self.runner.decode_sizes)
                self.runner.capture_piecewise(self.runner.piecewise_sizes[:1])
        self.packer = Packer(
            settings, N_PAGES, 64, count_split=self.runner.count_split, adapters=self.adapters.slots
        )
        self.ids = random_ids(N_TOKENS, 1)
        models = [oracle, *(merge(load_oracle(checkpoint), one) for one in folders)]
        self.expected = [model(torch.tensor([self.ids])).logits[0] for model in models]
        assert (self.expected[0] - self.expected[1]).abs().max() > 0.1

    def row(self, sequence: int, start: int, stop: int, adapter: int | None = None, adapter_start: int = 0) -> Row:
        """Returns a row that computes a part of a sequence over its pages, in the batch slot of its number.

        Its adapter is that of the sequence, if no number is given.
        """
        n_pages = -(-N_TOKENS // PAGE_SIZE)
        return Row(
            batch_slot=sequence,
            start=start,
            n_tokens=stop - start,
            tokens=tokens_of(self.ids[start:stop]),
            write_start=start,
            table_start=0,
            table_pages=tuple(range(sequence * n_pages, (sequence + 1) * n_pages)),
            sampling=GREEDY,
            adapter=self.digests[sequence if adapter is None else adapter],
            adapter_start=adapter_start,
        )

    def logits(self, rows: Sequence[Row], n_decode: int = 0) -> torch.Tensor:
        """Runs a step; returns the logits of each row's last token, [rows, vocab]."""
        step = self.packer.pack(StepPlan(0, tuple(rows), n_decode=n_decode))
        with torch.inference_mode():
            logits = self.runner.enqueue(step).logits
        return logits[list(range(len(rows))) if step.results is None else step.results.tolist()].cpu()

    def run(self, *rows: tuple[int, int, int], n_decode: int = 0) -> None:
        """Runs a step, and checks the logits of each row's last token."""
        found = self.logits([self.row(*row) for row in rows], n_decode)
        expected = torch.stack([self.expected[sequence][stop - 1] for sequence, _, stop in rows])
        difference = (found - expected).abs()
        assert difference.max() < 2e-3, f"{rows}: off by {difference.amax(-1).tolist()}"


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces what the interpreter lacks: a GPU's sizes, pinned memory, streams and graphs.

    A graph is replayed with the blocks that it was captured with, which a list of the adapters of runners has.
    """
    gpu = SimpleNamespace(major=8, minor=9, multi_processor_count=2, shared_memory_per_multiprocessor=102_400)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.inference_mode())
    monkeypatch.setattr(Staging, "stage", lambda self: StagingBuffer(torch.empty(self._size, dtype=torch.int32)))
    monkeypatch.setattr(CudaPool, "copy", lambda self, pairs: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    steps = list[Any]()
    init = OpenedAdapters.__init__

    def remember(self: OpenedAdapters, *arguments: Any) -> None:
        init(self, *arguments)
        steps.append(self.step)

    def capture(body: Callable[[], object], stream: object, memory: object) -> SimpleNamespace:
        captured = steps[-1].blocks

        def replay() -> None:
            current, steps[-1].blocks = steps[-1].blocks, captured
            body()
            steps[-1].blocks = current

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(OpenedAdapters, "__init__", remember)
    for module in (decode_graphs, piecewise_graphs):
        monkeypatch.setattr(module, "capture_graph", capture)
    return steps


class KernelCounter(TorchDispatchMode):
    """Counts the kernels of Triton and of torch that a decoder launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.n_kernels = 0
        self._is_counting = False
        launch, run = GridExecutor.__call__, Decoder.__call__

        def count(executor: GridExecutor, *arguments: Any, **options: Any) -> None:
            self.n_kernels += self._is_counting
            was_counting, self._is_counting = self._is_counting, False  # torch copies its arguments
            launch(executor, *arguments, **options)
            self._is_counting = was_counting

        def decode(*arguments: Any, **options: Any) -> Tensor:
            self._is_counting = True
            hidden = run(*arguments, **options)
            self._is_counting = False
            return hidden

        monkeypatch.setattr(GridExecutor, "__call__", count)
        monkeypatch.setattr(Decoder, "__call__", decode)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_allocation = "empty" in func.name()
        self.n_kernels += self._is_counting and not func.is_view and not is_allocation
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("without_a_gpu")
@pytest.mark.parametrize(("name", "n_products"), [("grouped", 4), ("mixtral", 2), ("gemma3", 4)])
def test_the_memory_of_graphs_counts_the_kernels_of_adapters(
    name: str, n_products: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "model", **CHECKPOINTS[name] | SIZES)
    world = World(resolve(str(tmp_path / "model")), tmp_path, has_graphs=False)
    assert world.n_products == n_products * world.decoder.n_mixers
    counts = []
    for sequence in (0, 1):
        with KernelCounter(monkeypatch) as counter:
            world.run((sequence, 0, 16))
        counts.append(counter.n_kernels)
    alone, with_adapters = counts
    assert 2 * world.n_products <= with_adapters - alone <= KERNELS_OF_ADAPTERS * world.n_products


@pytest.mark.usefixtures("without_a_gpu")
@pytest.mark.parametrize(("name", "has_graphs"), [("grouped", True), ("grouped", False), ("mixtral", True)])
def test_rows_of_the_model_and_of_adapters(name: str, has_graphs: bool, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", **CHECKPOINTS[name] | SIZES)
    world = World(resolve(str(tmp_path / "model")), tmp_path, has_graphs=has_graphs)
    assert bool(world.runner.piecewise_sizes) == has_graphs
    world.run((1, 0, 30), (0, 0, 13), (2, 0, 17))  # longer than the piecewise graph
    world.run((1, 30, 31), (0, 13, 20), (2, 17, 24), n_decode=1)  # within it
    world.run((1, 31, 32), (0, 20, 21), (2, 24, 25), n_decode=3)  # a decode graph
    world.run((0, 21, 22), n_decode=1)  # none has an adapter
    world.run((2, 25, 26), n_decode=1)
    world.run((0, 22, 60))
    world.run((2, 26, 27), (1, 32, 34))  # two tokens of a prompt, which fit a decode graph
    world.run((1, 34, 60), (2, 27, 28))


@pytest.mark.usefixtures("without_a_gpu")
def test_an_activated_adapter_changes_a_row_from_its_start_on(tmp_path: Path) -> None:
    """One row computes what two rows do, the first of which has no adapter."""
    save_checkpoint(tmp_path / "model", **CHECKPOINTS["grouped"] | SIZES)
    world = World(resolve(str(tmp_path / "model")), tmp_path, has_graphs=False)
    for start in (1, 16, 29):
        world.logits([world.row(1, 0, start, adapter=0)])
        expected = world.logits([world.row(1, start, 30)])
        found = world.logits([world.row(1, 0, 30, adapter_start=start), world.row(2, 0, 5, adapter_start=4)])
        torch.testing.assert_close(found[:1], expected, rtol=1e-4, atol=1e-4)
        for other in (start - 1, start + 1) if start < 29 else (start - 1,):
            shifted = world.logits([world.row(1, 0, 30, adapter_start=other)])
            assert (shifted - expected).abs().max() > 1e-2, "the position matters"
