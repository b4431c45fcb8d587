"""Steps of models with delta nets or Mamba2 through the GPU's runner, in float32: states, graphs, prompts, answers.

Triton's interpreter computes them where there is no GPU: a graph is then what it captured, run again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from kernel_support import DEVICE, on_kernels
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.errors import InvariantError
from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows
from radixkv.runtime.device.collectives import OneRank
from radixkv.runtime.device.cuda.model_runner import ModelRunner
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.graphs import decode as decode_graphs
from radixkv.runtime.device.graphs import piecewise as piecewise_graphs
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.pack import Packer
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.step.plan import Row, StateFork, StateLoad, StateSave, StepPlan
from support.checkpoints import save_checkpoint
from support.device_support import GREEDY, HYBRIDS, load_oracle, random_ids, tokens_of
from support.reference_attention import ReferenceAttention

pytestmark = [*on_kernels, pytest.mark.skipif(DEVICE == "cuda", reason="its graphs and streams are not real ones")]

PAGE_SIZE, MAX_ROWS, N_TREE_SLOTS, N_PAGES, N_TOKENS = 16, 6, 3, 64, 140
PIECE_SIZES = [32, 80]
"""Numbers of tokens that prompts have graphs for; of the steps here two are longer."""


class PlannedDecode(NamedTuple):
    n_rows: int
    variant: str


class GraphAttention(ReferenceAttention):
    """Attention whose graphs compute what was planned last, as kernels do that read their plan from memory."""

    def variants(self, bucket: int) -> list[Any]:
        return ["only"]

    def plan_decode(
        self, staged: StagingBuffer, rows: DecodeRows, bucket: int | None = None, variant: Any = None
    ) -> PlannedDecode:
        self._planned = super().plan_decode(staged, rows)
        return PlannedDecode(len(rows.batch_slots) if bucket is None else bucket, "only")

    def step(self, decode: Any, prompts: Any) -> LayerAttention:
        def planned() -> LayerAttention | None:
            rows = None if decode is None else self._planned
            has_rows = prompts is not None or (rows is not None and rows.rows.size)
            return ReferenceAttention.step(self, rows, prompts) if has_rows else None

        return LateAttention(planned)


class LateAttention:
    """Attention that looks at its plan when it runs."""

    def __init__(self, planned: Callable[[], LayerAttention | None]) -> None:
        self._planned = planned

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        out.zero_()
        if (attention := self._planned()) is not None:
            attention.run(layer, q, k_cache, v_cache, out)


class World:
    """A runner over a small model, two sequences, and Transformers' logits of both."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        device = torch.device(DEVICE)
        settings = DeviceSettings(
            page_size=PAGE_SIZE, max_num_seqs=MAX_ROWS, max_num_batched_tokens=512, max_model_len=256
        )
        with torch.inference_mode():
            with open_weights(checkpoint, load_format="auto", dtype=torch.float32, device=device) as weights:
                config = weights.config
                decoder = Decoder(weights, CudaOperations(config, 256, device))
            assert config.recurrent is not None
            self.states = CudaStates(config.recurrent, MAX_ROWS, N_TREE_SLOTS, torch.float32, device)
            sizes = config.n_heads, config.n_kv_heads, config.head_dim
            shape = AttentionShape(*sizes, PAGE_SIZE, torch.float32, config.attention_scale, torch.float32)
            attention = GraphAttention(shape, (None,) * len(config.attention_layers), device=device)
            stream: Any = SimpleNamespace(device=device, synchronize=lambda: None)
            self.runner = ModelRunner(decoder, attention, StagingLayout(), settings, stream, OneRank(), self.states)
            self.runner.open_pool(PageLayout.of(config, PAGE_SIZE, torch.float32), N_PAGES)
            self.runner.capture(self.runner.decode_sizes)
            self.runner.capture_piecewise(PIECE_SIZES)
        self.packer = Packer(settings, N_PAGES, 512, count_split=self.runner.count_split)
        self.ids = [random_ids(N_TOKENS, seed) for seed in (1, 2)]
        self.expected = load_oracle(checkpoint)(torch.tensor(self.ids)).logits

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

    def run(self, *rows: tuple[int, int, int, int], n_decode: int = 0, **states: Any) -> None:
        """Runs a step, and checks the logits of each row's last token."""
        plan = StepPlan(0, tuple(self.row(*row) for row in rows), n_decode=n_decode, **states)
        step = self.packer.pack(plan)
        self.states.check(plan)
        with torch.inference_mode():
            logits = self.runner.enqueue(step).logits[: len(rows)].clone()
        expected = torch.stack([self.expected[sequence, stop - 1] for _, sequence, _, stop in rows])
        difference = (logits.cpu() - expected).abs()
        assert difference.max() < 2e-3, f"{rows}: off by {difference.amax(-1).tolist()}"


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces what the interpreter lacks: pinned memory, streams and graphs."""
    monkeypatch.setattr(Staging, "stage", lambda self: StagingBuffer(torch.empty(self._size, dtype=torch.int32)))
    monkeypatch.setattr(CudaPool, "copy", lambda self, pairs: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for graphs in (decode_graphs, piecewise_graphs):
        monkeypatch.setattr(graphs, "capture_graph", lambda body, stream, memory: SimpleNamespace(replay=body))


@pytest.mark.usefixtures("without_a_gpu")
@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h"])
def test_states_go_on_through_prompts_answers_and_the_tree(tmp_path: Path, name: str) -> None:
    """Of these models one ends with attention, the other with a layer of Mamba2."""
    changes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "ssm_state_size": 16, "hidden_size": 64}
    heads = {"num_attention_heads": 4, "head_dim": 16}
    save_checkpoint(tmp_path, **HYBRIDS[name] | changes | heads)
    world = World(resolve(str(tmp_path)))
    buckets = {bucket for bucket, _ in world.runner._graphs[False]._graphs}
    assert buckets == {1, 2, 4, 6}
    assert max(world.runner.piecewise_sizes) == 512
    assert [world.runner._piecewise[False].bucket(n) for n in (14, 67, 164)] == [32, 80, None]

    # Prompts: one saves within its row, one at its end; the last row does not end at a block.
    world.run((0, 0, 0, 100), (1, 1, 0, 64), state_saves=(StateSave(0, 64, 0), StateSave(1, 64, 1)))
    # An answer beside the rest of a prompt, which saves where it begins and within.
    world.run(
        (0, 0, 100, 101),
        (1, 1, 64, 130),
        n_decode=1,
        state_saves=(StateSave(1, 64, 2), StateSave(1, 128, 1)),
    )
    # Answers alone, in a graph with padding: slots of other rows keep their states.
    world.run((0, 0, 101, 102), (1, 1, 130, 131), n_decode=2)
    world.run((1, 1, 131, 132), n_decode=1)
    world.run((0, 0, 102, 103), n_decode=1, state_saves=(StateSave(0, 103, 0),))
    with pytest.raises(InvariantError, match="slot 5 starts at position 64"):
        world.run((5, 0, 64, 100))
    # Hits: from the state of an answer, of a place within a row, and of the place where a row began. The slots have
    # had others' states, or none.
    world.run((2, 1, 0, 20))
    world.run(
        (2, 0, 103, 104),
        (5, 1, 128, 140),
        n_decode=1,
        state_loads=(StateLoad(0, 2), StateLoad(1, 5)),
        state_saves=(StateSave(5, 128, 0),),
    )
    world.run((4, 1, 64, 80), (3, 1, 128, 129), state_loads=(StateLoad(2, 4), StateLoad(0, 3)))
    # Forks: each has its parent's state, and both go on. A slot that is forked to may be forked from, or loaded.
    world.run(
        (2, 0, 104, 105),
        (3, 0, 104, 105),
        (5, 1, 80, 90),
        (4, 1, 80, 96),
        (0, 1, 128, 130),
        n_decode=2,
        state_forks=(StateFork(4, 3), StateFork(3, 5), StateFork(2, 3), StateFork(2, 0)),
        state_loads=(StateLoad(0, 0),),
    )
    world.run((5, 1, 90, 91), (3, 0, 105, 106), n_decode=2)
