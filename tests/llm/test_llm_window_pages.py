"""A model that mixes layers with and without windows gives back the memory behind the windows: no bit changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from radixkv import LLM, BeamSearchParams, RequestOutput, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.device import factory
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.memory.cpu.slab_pool import SlabPool
from radixkv.runtime.step.plan import StepPlan
from support import hits_in_bfloat16
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import OTHERS, load_oracle, random_ids
from support.greedy_oracle import check_greedy

END = 2
"""A token that ends a message, as the checkpoint's configuration says."""
WINDOW = 48
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
KINDS = {
    "gemma3": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "gpt-oss": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    # Four pages of a layer with one KV head of 32 take as much as one of four layers with two of 16.
    "gemma4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "num_kv_shared_layers": 1,
    },
    "gemma4-moe": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "global_head_dim": 32,
    },
    # A page of a layer with two KV heads of 32 takes as much as one of two layers with two of 16.
    "gemma4-shared": {},
}


KINDS_OF_RANKS = [kind for kind in KINDS if kind != "gemma4-moe"]
"""On ranks the one KV head of that kind's layers without windows is on each of them, so a slab would leave half of
its memory unused, and the small pools of these tests keep all pages."""
of_each_kind = pytest.mark.parametrize("folder", rest_nightly(KINDS, kept=(4,)), indirect=True)
of_gemma = pytest.mark.parametrize("folder", rest_nightly(KINDS, kept=(0,)), indirect=True)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    fields = {**OTHERS[request.param], **KINDS[request.param], "sliding_window": WINDOW, "eos_token_id": END}
    save_checkpoint(folder, **fields)
    return folder


def opened(folder: Path, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_total_tokens": 2048, **settings}
    return LLM(folder, device="cpu", max_model_len=512, **settings)


def cold_bits(folder: Path, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS) -> list[Any]:
    """Returns the bits of answers that are computed alone, with pages of all layers."""
    with pages_of_all_layers(), opened(folder, max_total_tokens=8192) as llm:
        assert not has_window_pages(llm)
        return [
            bits(llm.generate([{"prompt_token_ids": list(one), "cache_salt": f"{n}"}], params, use_tqdm=False)[0])
            for n, one in enumerate(prompts)
        ]


def pages_of_all_layers() -> Any:
    """Lets engines that are opened meanwhile keep the pages of all layers."""
    return patch.object(factory, "are_mixed", return_value=False)


def text(n: int, seed: int) -> list[int]:
    return [one for one in random_ids(2 * n, seed=seed) if one != END][:n]


def answers(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": list(one)} for one in prompts], params, use_tqdm=False)


def bits(output: RequestOutput) -> Any:
    """Returns the tokens of all answers with all their logprobs."""
    return [
        [{token: one.logprob for token, one in position.items()} for position in answer.logprobs or ()]
        for answer in output.outputs
    ]


def has_window_pages(llm: LLM) -> bool:
    return llm._open_loop.scheduler.states.window_stats() is not None


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_chats_behind_one_system_prompt_find_window_pages_with_the_bits_of_cold_ones(folder: Path) -> None:
    """The second chat finds the end of the system prompt; each turn that of the one before, though the template has
    changed its answer; prompts without messages find where the one before them forked off. The answers are also
    those of Transformers."""
    system = [*text(141, 1), END]
    first = [*system, *text(40, 2), END, *text(3, 3)]
    second = [*system, *text(75, 4), END, *text(3, 3)]
    turn = [*first[:-3], *text(30, 5), END, *text(60, 6), END, *text(3, 3)]
    plain = text(300, 7)
    forks = [[*plain[:210], *text(90, seed)] for seed in (8, 9, 10)]
    prompts = [first, second, turn, plain, *forks, plain, first]
    cold = cold_bits(folder, prompts)
    with opened(folder) as llm:
        assert has_window_pages(llm)
        warm = [answers(llm, [one])[0] for one in prompts]
        llm._open_loop.check()
        stats = llm.get_metrics()
    assert [bits(one) for one in warm] == cold
    assert [one.num_cached_tokens for one in warm] == [0, 128, 176, 0, 0, 208, 208, 288, 176]
    assert stats.states is None
    assert (windows := stats.windows) is not None
    assert (windows.hits_total, windows.missed_tokens_total, windows.evicted_total) == (6, 208, 0)
    assert 0 < windows.n_tails == windows.tails_kept_total
    assert 0 < windows.n_window_pages == windows.n_window_pages_evictable <= 4 * windows.n_tails
    oracle = load_oracle(resolve(str(folder)))
    check_greedy(oracle, [(one.prompt_token_ids, one.outputs[0].token_ids) for one in warm])


@of_each_kind
def test_in_bfloat16_prompts_that_go_on_from_windows_have_nearly_the_scores_of_cold_ones(folder: Path) -> None:
    with opened(folder, dtype="bfloat16") as llm:
        warm = hits_in_bfloat16.answer_prompts(llm, END)
    assert [one.num_cached_tokens for one in warm] == hits_in_bfloat16.N_CACHED
    with pages_of_all_layers(), opened(folder, dtype="bfloat16", enable_prefix_caching=False) as llm:
        assert hits_in_bfloat16.typical_error(warm, llm) < 0.1


@pytest.mark.parametrize("folder", rest_nightly(KINDS, kept=(2,)), indirect=True)
def test_memory_that_nobody_holds_is_never_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is NaN before each step: free pages, free slabs, and what a window page leaves of its slab."""
    stem = text(200, 1)
    prompts = [[*stem, *text(70, seed)] for seed in (2, 3, 4)] + [text(130, 5), stem[:120]]
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=1, ignore_eos=True)
    cold = cold_bits(folder, prompts, params)
    launch, n_unused = CpuExecutor.launch, []
    with opened(folder, max_total_tokens=1024, max_num_batched_tokens=96) as llm:
        cache, windows = llm._open_loop.scheduler.cache, llm._open_loop.scheduler.cache.window_pages
        assert isinstance(windows, WindowPages)

        def launched(executor: CpuExecutor, plan: StepPlan) -> Any:
            pool = executor.pool
            assert isinstance(pool, SlabPool)
            free = {*cache._free, *windows.replaced_pages()}
            held = [page for page in range(executor.n_pages) if page not in free]
            is_used = torch.zeros(pool.k.shape, dtype=torch.bool)
            of_pages, of_windows = pool._pages[0], pool._window_pages[0]
            is_used.view(of_pages.shape)[held] = True
            by_slab = is_used.view(len(of_windows), -1)
            by_slab[list(windows._in_tables | windows._in_tails), : of_windows.shape[1]] = True
            by_slab[-1] = True
            pool.k[~is_used] = pool.v[~is_used] = math.nan
            n_unused.append(int((~is_used).sum()))
            return launch(executor, plan)

        monkeypatch.setattr(CpuExecutor, "launch", launched)
        warm = answers(llm, prompts, params)
        again = answers(llm, prompts, params)
    assert [bits(one) for one in warm] == [bits(one) for one in again] == cold
    assert sum(one.num_cached_tokens or 0 for one in again) > 400
    assert len(set(n_unused)) > 10


@of_each_kind
def test_a_turn_that_repeats_the_answer_goes_on_behind_it(folder: Path) -> None:
    first = [*text(90, 1), END, *text(3, 3)]
    params = SamplingParams(temperature=0.0, max_tokens=83, logprobs=1, ignore_eos=True)
    with opened(folder) as llm:
        (answer,) = answers(llm, [first], params)
        turn = [*first, *answer.outputs[0].token_ids, END, *text(20, 4)]
        (warm,) = answers(llm, [turn])
        llm._open_loop.check()
    assert warm.num_cached_tokens == 176 == (len(first) + 82) // 16 * 16
    assert [bits(warm)] == cold_bits(folder, [turn])


@pytest.mark.nightly
@of_gemma
def test_one_token_more_or_less_than_a_page_and_the_whole_prompt_again(folder: Path) -> None:
    """Also prompts that are shorter than the window, whose answers pass it."""
    long = text(300, 1)
    prompts = [long, *(long[:n] for n in (16, 17, 48, 64, 257))] * 2
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=35, logprobs=1, ignore_eos=True)
    cold = cold_bits(folder, prompts[:6], params)
    with opened(folder, max_total_tokens=4096) as llm:
        warm = [answers(llm, [one], params)[0] for one in prompts]
    assert [bits(one) for one in warm] == cold * 2
    assert [one.num_cached_tokens for one in warm][6:] == [288, 0, 16, 32, 48, 256]


@pytest.mark.nightly
@of_gemma
@pytest.mark.parametrize(
    "settings",
    [
        {"max_total_tokens": 528},
        pytest.param({"max_num_batched_tokens": 79, "page_size": 8}, marks=pytest.mark.nightly),
        pytest.param(
            {
                "max_total_tokens": 336,
                "max_num_seqs": 5,
                "max_num_batched_tokens": 64,
                "num_reserved_decode_tokens": 0,
            },
            marks=pytest.mark.nightly,
        ),
        pytest.param({"enable_prefix_caching": False, "max_total_tokens": 528}, marks=pytest.mark.nightly),
    ],
    ids=["few pages", "short chunks", "preemptions", "no prefix caching"],
)
def test_bits_with_little_memory_and_many_requests_at_once(folder: Path, settings: dict[str, Any]) -> None:
    """Seeded and greedy, of two salts, three times over: tails and pages are evicted and come again."""
    stems = [text(n, seed) for n, seed in ((130, 1), (200, 2), (330, 3))]
    prompts = [[*stem[: len(stem) - cut], *text(20 + cut, cut)] for cut in (0, 10, 70) for stem in stems]
    n_tokens = 60 if "num_reserved_decode_tokens" in settings else 12
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=n_tokens, logprobs=1, ignore_eos=True, n=2)
    cold = cold_bits(folder, prompts, params)
    with opened(folder, **settings) as llm:
        assert has_window_pages(llm)
        for salt in ("", "a", ""):
            inputs = [{"prompt_token_ids": one, **({"cache_salt": salt} if salt else {})} for one in prompts]
            assert [bits(one) for one in llm.generate(inputs, params, use_tqdm=False)] == cold  # type: ignore[arg-type]
        llm._open_loop.check()
        metrics = llm.get_metrics()
        if "num_reserved_decode_tokens" in settings:
            assert metrics.preemptions_total > 0


@of_gemma
@pytest.mark.parametrize(
    ("settings", "what"),
    [({"max_total_tokens": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4}, "the pool is too small")],
    ids=["small pool"],
)
def test_the_log_says_why_all_pages_are_kept(
    folder: Path, settings: dict[str, Any], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), opened(folder, **settings) as llm:
        assert not has_window_pages(llm)
        assert what in caplog.text


@of_gemma
def test_an_explanation_says_where_the_nearest_window_is(folder: Path) -> None:
    stem = text(300, 1)
    with opened(folder) as llm:
        answers(llm, [stem])
        fork = {"prompt_token_ids": [*stem[:200], *text(60, 2)]}
        explained = llm.explain(fork)
        answers(llm, [fork["prompt_token_ids"]])
        again = llm.explain({"prompt_token_ids": [*stem[:200], *text(60, 3)]})
    assert (explained.reason, explained.n_cached, explained.n_without_state) == ("no_state", 0, 192)
    assert (again.reason, again.n_cached) == ("differs", 192)


@pytest.mark.nightly
@of_gemma
def test_beams_and_a_salt(folder: Path) -> None:
    """Beams fork again and again; a salt finds no window of another."""
    prompt = text(200, 1)
    params = BeamSearchParams(beam_width=3, max_tokens=40)
    found = []
    for context in (nullcontext(), pages_of_all_layers()):
        with context, opened(folder) as llm:
            (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
            found.append([(beam.tokens, beam.cum_logprob) for beam in output.sequences])
            salted = [
                llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], PARAMS, use_tqdm=False)[0]
                for salt in ("a", "b", "a")
            ]
            assert [one.num_cached_tokens for one in salted] in ([0, 0, 192], [0, 0, 199])
            llm._open_loop.check()
    assert found[0] == found[1]


@pytest.mark.nightly
@of_gemma
def test_requests_that_take_all_of_a_pool_are_answered(folder: Path) -> None:
    """Window pages and tails of the one before lie where they need other pages: they begin again, once."""
    settings = {"max_total_tokens": 192, "max_num_batched_tokens": 128, "max_num_seqs": 4}
    with opened(folder, **settings, num_reserved_decode_tokens=0) as llm:
        longest = llm.max_prompt_and_answer
        n = longest // 4
        for last in range(2):
            prompt = [
                *text(n, 1),
                END,
                *text(n // 2, 2),
                END,
                *text(n // 2, 3),
                END,
                *text(n // 4, 4 + last),
                END,
                5,
            ]
            n_new = longest - len(prompt)
            params = SamplingParams(temperature=0.0, max_tokens=n_new, logprobs=3, ignore_eos=True)
            (answer,) = answers(llm, [prompt], params)
            assert len(answer.outputs[0].token_ids) == n_new
            assert [bits(answer)] == cold_bits(folder, [prompt], params)
        assert llm.get_metrics().preemptions_total < 3
        llm._open_loop.check()


@of_gemma
@pytest.mark.parametrize("n_first", rest_nightly(range(20, 120, 20), kept=(1,)))
def test_prompts_that_take_all_of_a_pool_are_answered_in_chunks(folder: Path, n_first: int) -> None:
    settings = {"max_total_tokens": 192, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with opened(folder, **settings, num_reserved_decode_tokens=0) as llm:
        prompt = [*text(n_first, 1), END, *text(llm.max_prompt_and_answer - n_first - 9, 2), END]
        (answer,) = answers(llm, [prompt])
        assert [bits(answer)] == cold_bits(folder, [prompt])
        llm._open_loop.check()


@of_gemma
@pytest.mark.nightly
def test_short_chats_are_found_as_with_pages_of_all_layers(folder: Path) -> None:
    """Of chats shorter than the window as many as the pool holds: their tails need as many slabs as their pages."""
    n_cached = []
    for context in (nullcontext(), pages_of_all_layers()):
        with context, opened(folder, max_total_tokens=576, page_size=4) as llm:
            assert has_window_pages(llm) == isinstance(context, nullcontext)
            chats = [[*text(20, 100 + n), END, *text(8, 200 + n), END, 5] for n in range(8)]
            n_cached.append(0)
            for turn in range(2):
                for n, chat in enumerate(chats):
                    (answer,) = answers(llm, [chat])
                    n_cached[-1] += answer.num_cached_tokens
                    chats[n] = [*chat, *answer.outputs[0].token_ids, END, *text(6, turn * 50 + n), END, 5]
    assert n_cached[0] >= 0.9 * n_cached[1] > 0
