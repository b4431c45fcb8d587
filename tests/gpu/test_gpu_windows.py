"""Layers with windows that have pages of their own on a GPU: against the CPU, cold, alone, and with all pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cpu_oracle import check_hits, check_same_bits, check_scores, first_difference
from gpu_support import NEAR_TIE, check_same_answers, family, greedy, opened, random_ids, save, two_gpus

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.runtime.device import factory

WINDOW, END = 128, 2
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        # Queries and keys have norms: with a smaller number, rounding would decide what a token attends to.
        "query_pre_attn_scalar": 2500,
        "initializer_range": 0.02,
        "num_hidden_layers": 7,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        "head_dim": 256,
        "num_attention_heads": 4,
    },
    # Wider weights make routers so unsteady that bfloat16 hides what sinks do.
    "gpt-oss": {
        "model_type": "gpt_oss",
        "initializer_range": 0.02,
        "hidden_size": 480,
        "intermediate_size": 480,
        "num_attention_heads": 16,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 8,
    },
}
NOISE = 2.5
"""Allowed distance from float32, as a multiple of that of the CPU's own bfloat16."""
BACKENDS = ["triton", "flashinfer"]
"""FlashInfer's kernels are FA3 on Hopper, and FA2 elsewhere."""


@pytest.fixture(scope="module", params=[*MODELS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return save(folder, **MODELS[request.param], sliding_window=WINDOW, eos_token_id=END)


@pytest.fixture(params=[1, pytest.param(2, marks=two_gpus)])
def n_ranks(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@contextmanager
def on_gpu(folder: Path, *, has_windows: bool = True, **settings: Any) -> Iterator[LLM]:
    """Opens a model; its layers with windows have pages of their own, and all is consistent at the end."""
    if settings.get("attention_backend") == "flashinfer":
        pytest.importorskip("flashinfer", reason="its prompts are FlashInfer's")
    with opened(folder, **{"attention_backend": "triton", "max_num_seqs": 16, **settings}) as llm:
        assert (llm._open_loop.scheduler.states.window_stats() is not None) == has_windows
        yield llm
        llm._open_loop.check()


@pytest.mark.parametrize("kernel", ["fa2", "triton", None])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_layers_with_tables_of_their_own(page_size: int, kv_dtype: str, kernel: Any) -> None:
    """Pages of a layer are apart from each other, and entries behind windows name pages that hold NaN."""
    pytest.importorskip("flashinfer")
    from attention_world import World, ints

    from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows

    window = 200
    dtype = getattr(torch, kv_dtype)
    if dtype.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot convert 8-bit floats")
    shape = AttentionShape(32, 8, 128, page_size, torch.bfloat16, 128**-0.5, dtype)
    width, n_pages = 4096 // page_size, 16_384 // page_size
    world = World(
        shape, [None, window], width=width, n_pages=n_pages, prefill_kernel=kernel, has_sinks=page_size == 16
    )
    batch_slots, lengths = ints([4, 2, 60, 7, 9, 11, 3]), ints([900, 33, 3000, 200, 501, 2500, 1216])
    n_tokens = ints([1, 1, 1, 1, 300, 777, 1])
    for batch_slot, length in zip(batch_slots, lengths, strict=True):
        world.fill(int(batch_slot), int(length))
    q = world.queries(int(n_tokens.sum()))
    read = world.as_read(q, 4)
    expected = [world.expected(batch_slots, lengths, n_tokens, read, layer=layer) for layer in (0, 1)]

    moved = torch.randperm(n_pages, device="cuda").int()
    places = torch.cat([moved, torch.tensor([n_pages], device="cuda").int()])
    window_tables = places[world.tables.long()]
    caches = [(spread(world.k, 3), spread(world.v, 3)), (spread(world.k, 5), spread(world.v, 5))]
    for cache, source in zip(caches[1], (world.k, world.v), strict=True):
        cache.view(torch.uint8)[places.long()] = source.view(torch.uint8)
    # A page that no row has: all its K and V are NaN.
    nan_page = int(places[world.free[0]])
    for batch_slot, length, n in zip(batch_slots, lengths, n_tokens, strict=True):
        n_behind = max(int(length - n) + 1 - window, 0) // page_size
        window_tables[int(batch_slot), :n_behind] = nan_page
    world.attention.connect(world.staging, world.tables, window_tables)

    for variant in ("whole", "split", None):
        staged = world.staging.stage()
        decode = world.attention.plan_decode(staged, DecodeRows(batch_slots[:4], lengths[:4]), variant=variant)
        world.staging.send(staged)
        starts = lengths - n_tokens
        prompts = world.attention.plan_prompts(batch_slots[4:], starts[4:], n_tokens[4:])
        for layer in (0, 1):
            out = torch.full_like(q, math.nan)
            world.attention.step(decode, prompts).run(layer, q, *caches[layer], out)
            world.assert_close(out, expected[layer], 4)


def spread(cache: torch.Tensor, distance: int) -> torch.Tensor:
    """Returns a copy of a layer's pages that are ``distance`` pages apart, with NaN between them."""
    apart = torch.full((distance * len(cache), *cache.shape[1:]), math.nan, device=cache.device).to(cache.dtype)
    view = apart[1::distance]
    view.view(torch.uint8).copy_(cache.view(torch.uint8))
    return view


@pytest.mark.parametrize(
    ("settings", "noise"),
    [
        *(({"attention_backend": backend}, NOISE) for backend in BACKENDS),
        ({"page_size": 64, "enforce_eager": True}, NOISE),
        ({"kv_cache_dtype": "fp8"}, 20.0),
        ({"kv_cache_dtype": "fp8", "attention_backend": "flashinfer"}, 20.0),
        *(
            pytest.param({"tensor_parallel_size": 2, "attention_backend": backend}, NOISE, marks=two_gpus)
            for backend in BACKENDS
        ),
        pytest.param({"tensor_parallel_size": 2, "enforce_eager": True}, NOISE, marks=two_gpus),
        pytest.param({"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}, 20.0, marks=two_gpus),
    ],
    ids=str,
)
def test_scores_are_those_of_the_cpu_up_to_rounding(folder: Path, settings: dict[str, Any], noise: float) -> None:
    """Prompts in chunks beside answers, and answers that pass windows, teacher-forced on the CPU in float32."""
    prompts = [random_ids(n, seed=n) for n in (900, 1, 333, 120, 17)]
    with on_gpu(folder, max_num_batched_tokens=200, **settings) as llm:
        outputs = llm.generate(prompts, greedy(40, logprobs=20, prompt_logprobs=20), use_tqdm=False)
    check_scores(f"{settings}", outputs, folder, noise, min_share=0.85)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hits_have_the_bits_of_cold_prompts_whose_chunks_begin_at_the_same_places(
    n_ranks: int, folder: Path, backend: str
) -> None:
    """Then products have as many rows, and rows of prompts begin at the same window pages. Pages and steps of 64
    tokens make all chunks so."""
    system = [*random_ids(200, seed=1), END]
    prompts = [[*system, *random_ids(n, seed=n), END, *random_ids(9, seed=n + 1)] for n in (100, 300, 60)]
    prompts += [[*prompts[0][:290], *random_ids(90, seed=seed)] for seed in (5, 6, 7)]
    params = greedy(80, logprobs=20)
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 1,
        "page_size": 64,
        "attention_backend": backend,
        "tensor_parallel_size": n_ranks,
    }
    windows = check_hits(
        partial(on_gpu, folder, **settings), prompts, params, n_found_first=4 * 192, n_found_again=192
    ).windows
    assert windows is not None
    assert windows.hits_total >= 10


def test_answers_in_graphs_are_those_without(n_ranks: int, folder: Path) -> None:
    """Numbers of rows between those of graphs, and answers that pass the window."""
    prompts = [random_ids(20 + 23 * i, seed=i) for i in range(13)]
    params = greedy(150, logprobs=20)
    with on_gpu(folder, enforce_eager=True, max_num_seqs=13, tensor_parallel_size=n_ranks) as llm:
        eager = llm.generate(prompts, params, use_tqdm=False)
    with on_gpu(folder, max_num_seqs=64, tensor_parallel_size=n_ranks) as llm:
        for n in (13, 5, 3, 1):
            found = llm.generate(prompts[:n], params, use_tqdm=False)
            print(f"{n} rows: equal for {[first_difference(*pair) for pair in zip(eager, found, strict=False)]}")
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(eager[:n], answers, tolerance=NEAR_TIE, min_share=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_chats_beyond_the_window(folder: Path, backend: str) -> None:
    """Each turn goes on behind the one before, also where the template repeats the answer."""
    chats = [[*random_ids(300, seed=1), END, *random_ids(40 + i, seed=2 + i), END] for i in range(4)]
    with (
        on_gpu(folder, attention_backend=backend) as llm,
        on_gpu(folder, attention_backend=backend, enable_prefix_caching=False) as cold,
    ):
        for turn in range(5):
            found = llm.generate(chats, greedy(60, logprobs=20), use_tqdm=False)
            alone = [cold.generate([chat], greedy(60, logprobs=20), use_tqdm=False)[0] for chat in chats]
            check_same_answers(
                alone, [one.outputs[0].token_ids for one in found], tolerance=NEAR_TIE, min_share=0.1
            )
            cached = [one.num_cached_tokens or 0 for one in found]
            print(f"turn {turn}: {cached} of {[len(chat) for chat in chats]} tokens cached")
            if turn:
                assert all(n > len(chat) - 120 for n, chat in zip(cached, chats, strict=True))
            chats = [
                [*chat, *one.outputs[0].token_ids, END, *random_ids(20, seed=turn), END]
                for chat, one in zip(chats, found, strict=True)
            ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_that_share_pages(folder: Path, backend: str) -> None:
    """Shared pages are read once for many rows in layers without windows; each row has window pages of its own."""
    system = [*random_ids(1500, seed=1), END]
    prompts = [[*system, *random_ids(5 + 3 * seed, seed=2 + seed)] for seed in range(48)]
    params = greedy(40, logprobs=20)
    with on_gpu(folder, attention_backend=backend, enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    with on_gpu(folder, attention_backend=backend, max_num_seqs=64) as llm:
        llm.generate([system], greedy(1), use_tqdm=False)
        found = llm.generate(prompts, params, use_tqdm=False)
    print("cached", sorted({one.num_cached_tokens for one in found}))
    check_same_answers(alone, [one.outputs[0].token_ids for one in found], tolerance=NEAR_TIE, min_share=0.3)
    assert sum(one.num_cached_tokens or 0 for one in found) > 40 * 1400


def test_choices_and_beams_are_those_without_window_pages(folder: Path) -> None:
    """Forks copy part of a window page, and beams go on from each other."""
    prompts = [random_ids(n, seed=n) for n in (70, 200, 333)]
    sampled = SamplingParams(n=4, temperature=0.8, seed=3, max_tokens=60, logprobs=20, ignore_eos=True)
    beams = SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=40)
    with on_gpu(folder) as llm:
        found = llm.generate(prompts, sampled, use_tqdm=False)
        beam_found = llm.generate(prompts, beams, use_tqdm=False)
    no_windows = patch.object(factory, "are_mixed", return_value=False)
    with no_windows, on_gpu(folder, has_windows=False) as llm:
        expected = llm.generate(prompts, sampled, use_tqdm=False)
        beam_expected = llm.generate(prompts, beams, use_tqdm=False)
    pairs = [
        (one, other)
        for a, b in zip(found, expected, strict=True)
        for one, other in zip(a.outputs, b.outputs, strict=True)
    ]
    equal = [one.token_ids == other.token_ids for one, other in pairs]
    beam_equal = [
        one.outputs[0].token_ids == other.outputs[0].token_ids
        for one, other in zip(beam_found, beam_expected, strict=True)
    ]
    print(f"{sum(equal)} of {len(equal)} choices and {sum(beam_equal)} of {len(beam_equal)} best beams are equal")
    assert sum(equal) >= 0.25 * len(equal), "most answers differ, and not by rounding alone"


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_pages_and_windows_come_back_from_host_memory_and_after_a_restart_from_disk(
    kv_dtype: str, n_ranks: int, folder: Path, tmp_path: Path
) -> None:
    """With the bits of cold prompts, beside other prompts that take the pool. Pages and steps of 64 tokens make all
    chunks so."""
    system = [*random_ids(200, seed=1), END]
    prompts = [[*system, *random_ids(n, seed=n), END, *random_ids(9, seed=n + 1)] for n in (100, 300, 60)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 1, "page_size": 64}
    settings |= {"kv_cache_dtype": kv_dtype, "tensor_parallel_size": n_ranks}
    tiers = {"host_memory_bytes": 64 << 20, "cache_dir": str(tmp_path / "kv"), "load_policy": "always"}
    few = {"max_total_tokens": 2048, "max_model_len": 1024}

    def answers(llm: LLM) -> list[RequestOutput]:
        return [llm.generate([one], greedy(12, logprobs=20), use_tqdm=False)[0] for one in prompts]

    with on_gpu(folder, enable_prefix_caching=False, **settings) as llm:
        cold = answers(llm)
    for is_restarted in (False, True):
        with on_gpu(folder, **settings, **tiers, **few) as llm:
            for n in range(200):  # until the memory is pinned
                llm.generate([random_ids(5, seed=n)], greedy(1), use_tqdm=False)
                host = llm.get_metrics().host
                if host is not None and host.n_slots:
                    break
            n_others = int(1.2 * 64 * llm.get_metrics().n_pages) // 500
            others = [random_ids(500, seed=20 + n) for n in range(n_others)]
            for turn in range(4):
                found = answers(llm)
                print(
                    "cached, loaded and fetched tokens",
                    [(one.num_cached_tokens, one.num_loaded_tokens, one.num_fetched_tokens) for one in found],
                )
                check_same_bits(found, cold)
                if turn or is_restarted:
                    assert all((one.num_cached_tokens or 0) >= 192 for one in found)
                llm.generate(others, greedy(12), use_tqdm=False)
            metrics = llm.get_metrics()
        print(metrics.host, metrics.disk)
        assert metrics.host is not None
        assert metrics.disk is not None
        assert (metrics.host.copies_failed_total, metrics.disk.pages_lost_total) == (0, 0)
        assert metrics.host.pages_loaded_total > 0
        assert metrics.disk.pages_fetched_total > 0 or not is_restarted


def test_drafts_change_no_answer(folder: Path) -> None:
    """The second time drafts come from the tree, and are rows of the same window tables."""
    prompts = [random_ids(n, seed=n) for n in (30, 150, 333)]
    params = greedy(100, logprobs=20)
    with on_gpu(folder) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    with on_gpu(folder, speculative_config={"method": "tree"}) as llm:
        for _ in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            check_same_answers(
                alone, [one.outputs[0].token_ids for one in found], tolerance=NEAR_TIE, min_share=0.1
            )
        drafts = llm.get_metrics().drafts
    assert drafts is not None
    print(f"{drafts.accepted_tokens_total} of {drafts.draft_tokens_total} drafts accepted")
    assert drafts.accepted_tokens_total > 0


def test_many_requests_with_few_slabs(n_ranks: int, folder: Path) -> None:
    """Tails and pages are evicted, slabs change their use, and requests are preempted: answers stay right."""
    prompts = [one[:900] for one in family(80, seed=3)]
    params = greedy(24, logprobs=20)
    with on_gpu(folder, enable_prefix_caching=False, tensor_parallel_size=n_ranks) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    with on_gpu(
        folder,
        max_model_len=1024,
        max_num_seqs=12,
        max_total_tokens=3072,
        max_num_batched_tokens=300,
        num_reserved_decode_tokens=0,
        tensor_parallel_size=n_ranks,
    ) as llm:
        for turn in range(2):
            found = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.get_metrics()
            n_cached = sum(one.num_cached_tokens or 0 for one in found)
            equal = [first_difference(*pair) for pair in zip(alone, found, strict=True)]
            print(
                f"turn {turn}: {n_cached} cached tokens, {stats.preemptions_total} preemptions, {stats.windows}, "
                f"equal for {sum(equal) / len(equal):.1f} of 24 tokens on average"
            )
            answers = [one.outputs[0].token_ids for one in found]
            check_same_answers(alone, answers, tolerance=NEAR_TIE, min_share=0.3)
            assert n_cached > 0


def test_a_pool_holds_more_tokens_than_with_pages_of_all_layers(folder: Path) -> None:
    """Requests that did not fit before run at once."""
    prompts = [random_ids(1800, seed=seed) for seed in range(16)]
    with on_gpu(folder, max_total_tokens=16 * 1800, max_num_batched_tokens=512) as llm:
        n_pages = llm.get_metrics().n_pages
        llm.generate(prompts, greedy(100), use_tqdm=False)
        assert llm.get_metrics().preemptions_total == 0
    assert n_pages * 16 > 1.2 * 16 * 1800
