"""Piecewise graphs of small prompt steps: the same answers as without graphs, for all sizes.

The oracle is the engine with ``enforce_eager``, which captures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_drive import record
from gpu_support import (
    NEAR_TIE,
    check_same_answers,
    common_difference,
    engine_scores,
    greedy,
    opened,
    random_ids,
    save,
)

from radixkv import LLM

N_LAYERS = 2
LENGTHS = [1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 129, 191, 192, 193, 320, 500, 511, 512, 513, 900]


@pytest.fixture(scope="module")
def eager(sensitive_folder: Path) -> Iterator[LLM]:
    with opened(sensitive_folder, enable_prefix_caching=False, enforce_eager=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def captured(sensitive_folder: Path) -> Iterator[LLM]:
    with opened(sensitive_folder, enable_prefix_caching=False) as llm:
        yield llm


def test_answers_at_each_edge_of_a_bucket(eager: LLM, captured: LLM) -> None:
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    expected = [eager.generate([prompt], greedy(12, logprobs=20), use_tqdm=False)[0] for prompt in prompts]
    found = [captured.generate([prompt], greedy(12), use_tqdm=False)[0] for prompt in prompts]
    check_same_answers(expected, [answer.outputs[0].token_ids for answer in found], tolerance=NEAR_TIE)


def test_every_token_of_a_prompt(eager: LLM, captured: LLM) -> None:
    """Compares all tokens of a prompt, not only the last: padding tokens follow right after it."""
    for n in (17, 65, 500):
        prompt = random_ids(n, seed=n)
        ask = greedy(1, prompt_logprobs=0)
        scores = [engine_scores(llm.generate([prompt], ask, use_tqdm=False)[0])[0] for llm in (eager, captured)]
        assert len(scores[0]) == n - 1
        assert common_difference(*scores) < NEAR_TIE / 2


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize("n_prompts", [3, 5, 9, 33])
def test_steps_of_several_prompts(eager: LLM, captured: LLM, n_prompts: int, is_scored: bool) -> None:
    """The last layer's rows are padded to a captured number, also where one needs all tokens of its prompt."""
    prompts = [random_ids(2000 // n_prompts - i, seed=100 * n_prompts + i) for i in range(n_prompts)]
    ask = [greedy(6, logprobs=20)] * n_prompts
    if is_scored:
        ask[1] = greedy(6, logprobs=20, prompt_logprobs=0)
    plans = record(captured)
    answers = captured.generate(prompts, ask, use_tqdm=False)
    assert any(len(plan.rows) == n_prompts and plan.n_tokens > 512 for plan in plans)
    expected = [
        eager.generate([prompt], params, use_tqdm=False)[0] for prompt, params in zip(prompts, ask, strict=True)
    ]
    check_same_answers(expected, [answer.outputs[0].token_ids for answer in answers], tolerance=NEAR_TIE)
    if is_scored:
        assert common_difference(engine_scores(expected[1])[0], engine_scores(answers[1])[0]) < NEAR_TIE / 2


def test_padding_leaves_the_pool_alone(eager: LLM, sensitive_folder: Path) -> None:
    """Prompts come in small chunks, each padded; the second answers read K and V that the first ones stored."""
    prompts = [random_ids(50 + 37 * i, seed=i) for i in range(8)]
    with opened(sensitive_folder, max_num_batched_tokens=97) as llm:
        llm.generate(prompts, greedy(2), use_tqdm=False)
        warm = llm.generate(prompts, greedy(12), use_tqdm=False)
        assert llm.get_metrics().prefix_hits_total > 0
    expected = [eager.generate([prompt], greedy(12, logprobs=20), use_tqdm=False)[0] for prompt in prompts]
    check_same_answers(expected, [answer.outputs[0].token_ids for answer in warm], tolerance=NEAR_TIE)


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"num_hidden_layers": 1}],
    ids=["plain", "bias", "tied", "one layer"],
)
def test_shapes_of_models(tmp_path: Path, changes: dict[str, object]) -> None:
    sensitive_folder = save(tmp_path, **changes)
    prompts = [random_ids(n, seed=n) for n in (5, 70, 300)]
    ask = greedy(4, prompt_logprobs=0)
    scores = []
    for enforce_eager in (True, False):
        with opened(sensitive_folder, enforce_eager=enforce_eager) as llm:
            answers = [llm.generate([prompt], ask, use_tqdm=False)[0] for prompt in prompts]
            scores.append([engine_scores(answer)[0] for answer in answers])
    for one, other in zip(*scores, strict=True):
        assert common_difference(one, other) < 0.05


def test_which_steps_are_captured(eager: LLM, captured: LLM) -> None:
    """One replay per layer for a small prompt; one for a decode step, or a prompt of as many tokens as the largest
    has rows; none for large steps or ``enforce_eager``."""
    assert _n_replays(captured, n_prompt=64, n_new=1) == 1
    assert _n_replays(captured, n_prompt=65, n_new=1) == N_LAYERS
    assert _n_replays(captured, n_prompt=513, n_new=1) == 0
    assert _n_replays(captured, n_prompt=65, n_new=3) >= N_LAYERS + 2
    assert _n_replays(eager, n_prompt=64, n_new=3) == 0


def _n_replays(llm: LLM, n_prompt: int, n_new: int) -> int:
    llm.generate([random_ids(n_prompt, seed=1)], greedy(n_new), use_tqdm=False)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        llm.generate([random_ids(n_prompt, seed=2)], greedy(n_new), use_tqdm=False)
        torch.cuda.synchronize()
    return sum(event.name == "cudaGraphLaunch" for event in profile.events() or ())
