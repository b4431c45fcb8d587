"""Steps of models whose layers with windows have pages of their own through the GPU's runner, in float32.

Triton's interpreter computes them where there is no GPU: a graph is then what it captured, run again. A page cache
gives the pages. All memory that no request and no tail holds is NaN.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_support import DEVICE, on_kernels

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.attention.cuda.shaped import open_attention
from radixkv.runtime.device.collectives import OneRank
from radixkv.runtime.device.cuda.model_runner import ModelRunner
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.graphs import decode as decode_graphs
from radixkv.runtime.device.graphs import piecewise as piecewise_graphs
from radixkv.runtime.device.memory.cuda.slab_pool import CudaSlabPool
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer, StagingLayout
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.memory.slab_shape import SlabShape
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.pack import Packer
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.window_pool import max_window_pages
from radixkv.tree.node import Namespace
from support.checkpoints import save_checkpoint
from support.device_support import GREEDY, OTHERS, load_oracle, random_ids, tokens_of

pytestmark = [
    *on_kernels,
    pytest.mark.skipif(DEVICE == "cuda", reason="its graphs and streams are not real ones"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # padding tokens have what memory happens to hold
]

PAGE_SIZE, WINDOW, MAX_ROWS, MAX_TOKENS, MAX_MODEL_LEN = 16, 40, 6, 128, 192
SLIDING, FULL = "sliding_attention", "full_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]},
    "gpt-oss": {"num_hidden_layers": 3},
    # A slab is two pages of two layers with a KV head of 32, or a page of three layers with two of 16, which leaves
    # a quarter unused. The last two layers read K and V of others, one of each shape.
    "gemma4-shared": {
        "num_hidden_layers": 7,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}


class Sequence:
    """Tokens, the pages of those that are computed, and Transformers' logits."""

    def __init__(self, world: World, ids: list[int], batch_slot: int, blocks: BlockTable | None = None) -> None:
        self.ids, self.batch_slot = ids, batch_slot
        self.tokens = bytearray(tokens_of(ids))
        self.blocks = blocks or world.cache.open(Namespace(), bytes(self.tokens))
        self.n_computed = self.blocks.n_leased * PAGE_SIZE
        self.expected = world.oracle(torch.tensor([ids])).logits[0]


class World:
    """A runner over a small model, and the page cache of its pool."""

    def __init__(self, checkpoint: Checkpoint, n_slabs: int, *, has_graphs: bool) -> None:
        device = torch.device(DEVICE)
        settings = DeviceSettings(
            page_size=PAGE_SIZE,
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=not has_graphs,
            has_window_pages=True,
        )
        with torch.inference_mode():
            with open_weights(checkpoint, load_format="auto", dtype=torch.float32, device=device) as weights:
                config = weights.config
                decoder = Decoder(weights, CudaOperations(config, MAX_MODEL_LEN, device))
            windows, layout = config.windows_within(MAX_MODEL_LEN), StagingLayout()
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
                windows,
                max_rows=MAX_ROWS,
                layout=layout,
                device=device,
                sinks=decoder.sinks,
                prefill_kernel="triton",
            )
            stream: Any = SimpleNamespace(device=device, synchronize=lambda: None)
            self.runner = ModelRunner(decoder, attention, layout, settings, stream, OneRank())
            page = PageLayout.of(config, PAGE_SIZE, torch.float32)
            n_more = max_window_pages(WINDOW, MAX_TOKENS, PAGE_SIZE)
            self.shape = SlabShape(page, windows, n_slabs, n_more)
            self.runner.open_pool(page, 0, self.shape)
            self.runner.capture(self.runner.decode_sizes[1::2])
            self.runner.capture_piecewise(self.runner.piecewise_sizes[1:2])
        self.windows = WindowPages.of(self.shape.pool, PAGE_SIZE)
        self.cache = PageCache(
            self.shape.n_pages,
            PAGE_SIZE,
            n_states=n_slabs,
            state_block_tokens=PAGE_SIZE,
            window_pages=self.windows,
        )
        self.packer = Packer(settings, self.shape.n_pages, MAX_TOKENS, count_split=self.runner.count_split)
        self.entries = self.packer.window_entries(self.shape.pool)
        self.oracle = load_oracle(checkpoint)
        self.poison()

    def poison(self) -> None:
        """Fills all memory with NaN that no page in use has, but for the slab that stays zero."""
        pages = set(range(self.shape.n_pages)) - set(self.cache._free) - {*self.windows.replaced_pages()}
        window_pages = list(self.windows._in_tables | self.windows._in_tails)
        is_used = torch.zeros(self.shape.n_values, dtype=torch.bool)
        is_used.view(-1, self.shape.page_values)[list(pages)] = True
        is_used.view(-1, self.shape.slab_values)[window_pages, : self.shape.window_page_values] = True
        is_used[-self.shape.slab_values :] = True
        pool = self.runner.pool
        assert isinstance(pool, CudaSlabPool)
        with torch.inference_mode():
            for memory in (pool.k, pool.v):
                memory[~is_used] = math.nan

    def run(self, *rows: tuple[Sequence, int], n_decode: int = 0, n_drafts: int = 0) -> None:
        """Runs a step that computes sequences up to a position, and checks the logits of each row's last token, and
        of tokens before drafts."""
        plan_rows, expected = [], []
        for index, (one, stop) in enumerate(rows):
            blocks, start = one.blocks, one.n_computed
            assert self.cache.reserve(blocks, self.cache.pages_for(stop))
            window_start, window_pages = blocks.window.take_news()
            drafts = n_drafts if index < n_decode else 0
            plan_rows.append(
                Row(
                    batch_slot=one.batch_slot,
                    start=start,
                    n_tokens=stop - start,
                    tokens=tokens_of(one.ids[start:stop]),
                    write_start=start,
                    table_start=blocks.n_on_device,
                    table_pages=tuple(blocks.pages[blocks.n_on_device :]),
                    sampling=GREEDY,
                    n_drafts=drafts,
                    window_start=window_start,
                    window_pages=window_pages,
                )
            )
            blocks.n_on_device = len(blocks.pages)
            expected.append(one.expected[stop - 1 - drafts : stop])
        plan = StepPlan(
            0,
            tuple(plan_rows),
            copies=tuple(pair for one, _ in rows for pair in one.blocks.copies),
            window_copies=tuple(pair for one, _ in rows for pair in one.blocks.window.copies),
            n_decode=n_decode,
            n_drafts=n_decode * n_drafts,
        )
        self.entries.check(plan)
        step = self.packer.pack(plan)
        positions = slice(len(rows) + plan.n_drafts) if step.results is None else step.results.tolist()
        with torch.inference_mode():
            logits = self.runner.enqueue(step).logits[positions].clone()
        difference = (logits.cpu() - torch.cat(expected)).abs()
        assert difference.max() < 2e-3, f"off by {difference.amax(-1).tolist()}"
        for one, stop in rows:
            one.blocks.copies, one.blocks.window.copies, one.n_computed = [], [], stop
            self.cache.commit(one.blocks, one.tokens, stop, 0)
            self.cache.mark_computed(one.blocks, stop, 0)

    def free_behind(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.cache.free_behind(one.blocks, one.n_computed)
        self.poison()

    def keep_tail(self, one: Sequence, position: int) -> None:
        """Lets other sequences go on from a position of one that still has its window."""
        states, lease = self.cache.tree.states, one.blocks.lease
        assert states is not None
        assert lease is not None
        state = states.put(lease, position)
        assert state is not None
        self.windows.keep(one.blocks.window, state)
        states.computed(state)

    def fork(self, one: Sequence, batch_slot: int) -> Sequence:
        """Returns a sequence with the same tokens, whose last one is to be computed again."""
        n_pages = self.cache.pages_for(one.n_computed)
        assert self.cache.can_fork(one.blocks, one.n_computed - 1, n_pages, self.cache.n_available)
        second = Sequence(self, one.ids, batch_slot, self.cache.fork(one.blocks, one.n_computed - 1, n_pages))
        second.n_computed = one.n_computed - 1
        return second

    def end(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.cache.close(one.blocks)
        self.poison()


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces what the interpreter lacks: pinned memory, streams and graphs."""

    def captured(body: Any, stream: Any, memory: Any) -> Any:
        return SimpleNamespace(replay=body)

    gpu = SimpleNamespace(major=8, minor=9, multi_processor_count=4, shared_memory_per_multiprocessor=102_400)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(Staging, "stage", lambda self: StagingBuffer(torch.empty(self._size, dtype=torch.int32)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(decode_graphs, "capture_graph", captured)
    monkeypatch.setattr(piecewise_graphs, "capture_graph", captured)


@pytest.mark.parametrize(
    ("name", "has_graphs"),
    [("gemma3", True), ("gpt-oss", False), ("gemma4-shared", True)],
    ids=["gemma3 with graphs", "gpt-oss eager", "gemma4 with graphs"],
)
def test_prompts_answers_hits_forks_and_drafts(name: str, has_graphs: bool, tmp_path: Path) -> None:
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    save_checkpoint(tmp_path, **OTHERS[name] | SHAPES[name] | heads | {"sliding_window": WINDOW})
    world = World(resolve(str(tmp_path)), 18, has_graphs=has_graphs)
    first, second = (Sequence(world, random_ids(MAX_MODEL_LEN - 20, seed), seed) for seed in (0, 1))

    # Prompts in chunks: the second ones begin behind pages that are free by then.
    world.run((first, 90), (second, 38))
    world.keep_tail(first, 80)
    world.free_behind(first, second)
    assert first.blocks.window.first == 2
    world.run((first, 100), (second, 130))
    world.free_behind(first, second)
    # An answer beside a prompt that takes freed pages, then answers alone.
    third = Sequence(world, random_ids(60, 2), 2)
    world.run((first, 101), (third, 30), n_decode=1)
    world.run((first, 102), (second, 131), (third, 31), n_decode=3)
    world.free_behind(first, second, third)
    # Drafts, which pass the end of a page.
    world.run((first, 105), (second, 134), n_decode=2, n_drafts=2)
    world.run((first, 106), (third, 33), n_decode=1)
    world.end(third)
    # A fork in mid page, whose window pages are shared but for the last.
    fork = world.fork(second, 2)
    assert fork.blocks.window.copies
    world.run((fork, 134), n_decode=1)
    world.run((fork, 135), (second, 135), n_decode=2)
    world.free_behind(second, fork)
    world.end(second, fork)
    # A hit: another prompt goes on from the first one's tail.
    hit = Sequence(world, [*first.ids[:85], *random_ids(40, 4)], 1)
    assert hit.n_computed == 80
    world.run((first, 107), (hit, 100), n_decode=1)
    world.free_behind(first, hit)
    world.run((hit, 101), (first, 108), n_decode=2)
    world.end(first, hit)
    world.cache.check([])
