"""Layers with windows have pages of their own on several ranks, too.

No bit changes beside one process that keeps all pages and multiplies in slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, BeamSearchParams, RequestOutput, SamplingParams
from radixkv.runtime.device import factory
from radixkv.runtime.device.cpu import executor
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import OTHERS, random_ids
from support.sliced_operations import SlicedOperations

END = 2
"""A token that ends a message, as the checkpoint's configuration says."""
WINDOW = 48
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, logprobs=1, ignore_eos=True, n=2)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
KINDS = {
    "gemma3": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "gpt-oss": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "num_kv_shared_layers": 1,
    },
    "gemma4-shared": {},
}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    fields = {**OTHERS[request.param], **KINDS[request.param], "sliding_window": WINDOW, "eos_token_id": END}
    save_checkpoint(folder, **fields)
    return folder


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", max_model_len=512, **settings)


def text(n: int, seed: int) -> list[int]:
    return [one for one in random_ids(2 * n, seed=seed) if one != END][:n]


def prompts() -> list[list[int]]:
    """Returns a chat of two turns behind a system prompt, another chat, and prompts that fork."""
    system, plain = [*text(141, 1), END], text(300, 7)
    first = [*system, *text(40, 2), END, *text(3, 3)]
    second = [*system, *text(75, 4), END, *text(3, 3)]
    turn = [*first[:-3], *text(30, 5), END, *text(60, 6), END, *text(3, 3)]
    return [first, second, turn, plain, *([*plain[:210], *text(90, seed)] for seed in (8, 9)), plain]


def bits(output: RequestOutput) -> Any:
    """Returns the tokens of all answers with all their logprobs."""
    return [
        [{token: one.logprob for token, one in position.items()} for position in answer.logprobs or ()]
        for answer in output.outputs
    ]


def has_window_pages(llm: LLM) -> bool:
    return llm._open_loop.scheduler.states.window_stats() is not None


def answers(llm: LLM, inputs: Sequence[Sequence[int]], params: SamplingParams = SAMPLED) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": list(one)} for one in inputs], params, use_tqdm=False)


def beams(llm: LLM) -> list[tuple[list[int], float]]:
    (found,) = llm.beam_search([{"prompt_token_ids": text(200, 1)}], BEAMS)
    return [(list(beam.tokens), beam.cum_logprob) for beam in found.sequences]


@pytest.mark.parametrize(
    ("folder", "n_ranks"),
    rest_nightly([(kind, n) for n in (2, 4) for kind in KINDS], kept=(0,)),
    indirect=["folder"],
)
def test_ranks_have_the_bits_of_one_process_that_keeps_all_pages(
    folder: Path, n_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits, forks, choices and beams, one request after the other and all at once in a pool that is too small for
    them: tails are evicted and requests preempted."""
    inputs = prompts()
    with monkeypatch.context() as patched:
        patched.setattr(executor, "CpuOperations", partial(SlicedOperations, n_slices=n_ranks))
        patched.setattr(factory, "are_mixed", lambda _windows: False)
        with opened(folder, enable_prefix_caching=False, max_total_tokens=8192) as llm:
            assert not has_window_pages(llm)
            expected = [bits(answers(llm, [one])[0]) for one in inputs]
            expected_beams = beams(llm)
    few = {"max_total_tokens": 640, "max_num_batched_tokens": 79, "num_reserved_decode_tokens": 0}
    with opened(folder, **few, tensor_parallel_size=n_ranks) as llm:
        assert has_window_pages(llm)
        found = [answers(llm, [one])[0] for one in inputs]
        together = answers(llm, inputs)
        found_beams = beams(llm)
        llm._open_loop.check()
        metrics = llm.get_metrics()
    for outputs in (found, together):
        assert [bits(one) for one in outputs] == expected
    assert found_beams == expected_beams
    assert [one.num_cached_tokens for one in found] == [0, 128, 176, 0, 0, 208, 288]
    assert metrics.windows is not None
    assert metrics.windows.evicted_total > 0
    assert metrics.preemptions_total > 0
