"""A model on two GPUs: sums, answers, and ranks that die or hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import rank_sums_worker
import torch
from gpu_support import NEAR_TIE, greedy, opened, random_ids, save
from test_gpu_models import ARCHITECTURES, compare

from radixkv import SamplingParams
from radixkv.errors import ConfigError, DeviceLost
from support.processes import children, has_ended

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
RANK = "radixkv.runtime.device.ranks.rank"
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "attention_backend": "triton"}


def on_two(compute: Callable[[int, int, Path], Any], store: Path) -> list[Any]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        return [one.result(120) for one in [processes.submit(compute, rank, 2, store) for rank in range(2)]]


def test_sums_and_norms_have_the_bits_of_one_gpu(tmp_path: Path) -> None:
    assert on_two(rank_sums_worker.compare_sums, tmp_path / "store") == [[], []]


def test_ranks_have_equal_bits_after_many_steps(tmp_path: Path) -> None:
    first, second = on_two(rank_sums_worker.residual_after_many_steps, tmp_path / "store")
    assert first == second


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_of_two_gpus_are_as_near_to_float32_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    compare(save(tmp_path, **ARCHITECTURES[name]), "bfloat16", **TWO)


def test_scores_of_two_gpus_with_k_and_v_in_8_bits(tmp_path: Path) -> None:
    compare(save(tmp_path, **ARCHITECTURES["qwen3"]), "bfloat16", noise=10.0, kv_cache_dtype="fp8", **TWO)


def test_sampled_tokens_and_drafts_reach_all_ranks(sensitive_folder: Path) -> None:
    """Scored as a prompt, an answer has the log-probabilities that it had when it was sampled."""
    prompts = [random_ids(n, seed=n) for n in (300, 17, 64, 5)]
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, logprobs=0)
    with opened(sensitive_folder, **TWO, speculative_config={"method": "tree"}) as llm:
        for params in (sampled, greedy(60, logprobs=0), greedy(60, logprobs=0)):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            sequences = [[*prompt, *one.outputs[0].token_ids] for prompt, one in zip(prompts, outputs, strict=True)]
            scored = llm.generate(sequences, greedy(1, prompt_logprobs=0), use_tqdm=False)
            for prompt, output, score in zip(prompts, outputs, scored, strict=True):
                answer, ranked = output.outputs[0], score.prompt_logprobs
                assert answer.logprobs is not None
                assert ranked is not None
                for index, token in enumerate(answer.token_ids):
                    of_prompt = ranked[len(prompt) + index]
                    assert of_prompt is not None
                    assert abs(answer.logprobs[index][token].logprob - of_prompt[token].logprob) < NEAR_TIE


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 14.0)])
def test_a_rank_that_dies_or_hangs_under_load_ends_the_step(
    number: signal.Signals, limit_s: float, sensitive_folder: Path
) -> None:
    """The process goes on, and can open the model again."""
    before = set(children(os.getpid(), RANK))
    pids: list[int] = []
    for is_killed in (True, False):
        with opened(sensitive_folder, **TWO) as llm:
            (pid,) = set(children(os.getpid(), RANK)) - before
            pids.append(pid)
            prompts = [random_ids(50, seed=n) for n in range(8)]
            llm.generate(prompts, greedy(8), use_tqdm=False)
            if not is_killed:
                continue
            killed: list[float] = []

            def kill(pid: int = pid, killed: list[float] = killed) -> None:
                killed.append(time.monotonic())
                os.kill(pid, number)

            threading.Timer(0.5, kill).start()
            with pytest.raises(
                DeviceLost, match="was ended by SIGKILL" if number is signal.SIGKILL else "not respond in 10 s"
            ):
                llm.generate(prompts, greedy(4000), use_tqdm=False)
            assert time.monotonic() - killed[0] < limit_s
    assert all(map(has_ended, pids))


def test_wrong_numbers_of_gpus_are_refused(sensitive_folder: Path) -> None:
    before = children(os.getpid(), RANK)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \d+ needs as many GPUs, and torch sees \d"):
        opened(sensitive_folder, tensor_parallel_size=2 * torch.cuda.device_count()).__enter__()
    assert children(os.getpid(), RANK) == before
