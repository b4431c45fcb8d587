"""A model on two GPUs: sums, answers, and ranks that die or hang."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import rank_sums_worker
import torch
from gpu_support import (
    NEAR_TIE,
    SHAPE,
    Scores,
    agreement,
    engine_scores,
    greedy,
    opened,
    random_ids,
    save,
    sequence_of,
)
from test_gpu_models import ARCHITECTURES, NOISE, compare

from radixkv import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputs
from radixkv.errors import ConfigError, DeviceLost
from radixkv.runtime.device.cuda.model_runner import ModelRunner
from support.processes import children, has_ended
from support.quantized_checkpoints import save_quantized

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
RANK = "radixkv.runtime.device.ranks.rank"
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "attention_backend": "triton"}


def on_ranks(n_ranks: int, compute: Callable[[int, int, Path], Any], store: Path) -> list[Any]:
    with ProcessPoolExecutor(n_ranks, multiprocessing.get_context("spawn")) as processes:
        ranks = [processes.submit(compute, rank, n_ranks, store) for rank in range(n_ranks)]
        return [one.result(120) for one in ranks]


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_sums_and_norms_have_the_bits_of_one_gpu(
    n_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four ranks two share a GPU in turns where there are no more. Their larger sums have two shots."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert on_ranks(n_ranks, rank_sums_worker.compare_sums, tmp_path / "store") == [[]] * n_ranks


def test_ranks_have_equal_bits_after_many_steps(tmp_path: Path) -> None:
    first, second = on_ranks(2, rank_sums_worker.residual_after_many_steps, tmp_path / "store")
    assert first == second


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_of_two_gpus_are_as_near_to_float32_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    compare(save(tmp_path, **ARCHITECTURES[name]), "bfloat16", **TWO)


def test_scores_of_two_gpus_with_weights_that_are_rounded_to_fp8(tmp_path: Path) -> None:
    compare(save(tmp_path, **ARCHITECTURES["qwen3"]), "bfloat16", noise=40.0, quantization="fp8", **TWO)


@pytest.mark.parametrize("format_name", ["fp8 channels", "fp8 blocks 128", "awq 32", "gptq rows", "mxfp4"])
def test_scores_of_quantized_checkpoints_on_two_gpus(format_name: str, tmp_path: Path) -> None:
    changes = ARCHITECTURES["gpt-oss"] if format_name == "mxfp4" else {}
    save_quantized(tmp_path, format_name, **{**SHAPE, "initializer_range": 0.02, **changes})
    noise = 40.0 if format_name.startswith("fp8") else NOISE
    compare(tmp_path / "quantized", "bfloat16", noise=noise, oracle=tmp_path / "dense", **TWO)


def test_scores_of_two_gpus_with_k_and_v_in_8_bits(tmp_path: Path) -> None:
    compare(save(tmp_path, **ARCHITECTURES["qwen3"]), "bfloat16", noise=10.0, kv_cache_dtype="fp8", **TWO)


def test_sampled_tokens_and_drafts_reach_all_ranks(sensitive_folder: Path) -> None:
    """Scored as a prompt, an answer has the log-probabilities that it had when it was sampled."""
    prompts = [random_ids(n, seed=n) for n in (300, 17, 64, 5)]
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, logprobs=0)
    with opened(sensitive_folder, **TWO, speculative_config={"method": "tree"}) as llm:
        for params in (sampled, greedy(60, logprobs=0), greedy(60, logprobs=0)):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for output, scores in zip(outputs, scored_again(llm, map(sequence_of, outputs)), strict=True):
                _, found = engine_scores(output)
                for (position, token), logprob in found.items():
                    assert abs(logprob - scores[position, token]) < NEAR_TIE


def test_beams_are_those_of_the_scores(sensitive_folder: Path) -> None:
    """Beams continue from pages and tokens that all ranks must have reordered alike."""
    prompts = [random_ids(n, seed=n) for n in (300, 17)]
    with opened(sensitive_folder, **TWO) as llm:
        for output in llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True)):
            beams = output.sequences
            n_prompt = len(beams[0].tokens) - 30
            for beam, scores in zip(beams, scored_again(llm, [beam.tokens for beam in beams]), strict=True):
                answer = sum(scores[index, beam.tokens[index]] for index in range(n_prompt, len(beam.tokens)))
                assert beam.cum_logprob == pytest.approx(answer, abs=3 * NEAR_TIE)
            assert len({tuple(beam.tokens) for beam in beams}) == 4


def scored_again(llm: LLM, sequences: Iterable[list[int]]) -> list[Scores]:
    """Returns the scores of the sequences as prompts."""
    outputs = llm.generate(list(sequences), greedy(1, prompt_logprobs=0), use_tqdm=False)
    return [engine_scores(output)[0] for output in outputs]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_pages_of_both_gpus_come_back_from_host_memory(kv_dtype: str, sensitive_folder: Path) -> None:
    prompts = [random_ids(900, seed=n) for n in range(8)]
    settings = {**TWO, "max_total_tokens": 4096, "host_memory_bytes": 256 << 20, "kv_cache_dtype": kv_dtype}
    with opened(sensitive_folder, **settings) as llm:

        def answer() -> list[RequestOutput]:
            return [llm.generate([one], greedy(1, logprobs=20), use_tqdm=False)[0] for one in prompts]

        cold = answer()
        assert all(output.num_cached_tokens < 100 for output in cold)
        for _ in range(200):  # until the memory is pinned
            warm = answer()
            if all(output.num_cached_tokens > 850 for output in warm):
                break
            time.sleep(0.05)
        else:
            pytest.fail("nothing comes back")
        for before, after in zip(cold, warm, strict=True):
            expected, found = engine_scores(before)[1], engine_scores(after)[1]
            both = expected.keys() & found.keys()
            assert len(both) > 15
            assert all(abs(expected[one] - found[one]) < NEAR_TIE for one in both)


def test_masks_hold_beside_rows_without_masks() -> None:
    """Masks are filled while the step runs on all ranks, which get the tokens that rank 0 chose with them."""
    masked = SamplingParams(
        temperature=1.0, seed=1, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-f]{8}")
    )
    prompts = ["A story of a lighthouse keeper and", "Question: 3 plus 4?"] * 8
    with LLM("tiny", device="cuda", max_total_tokens=32_768, speculative_config="off", **TWO) as llm:
        (alone,) = llm.generate(prompts[:1], greedy(12, logprobs=5), use_tqdm=False)
        outputs = llm.generate(prompts, [greedy(12), masked] * 8, use_tqdm=False)
    assert all(re.fullmatch("[a-f]{8}", output.outputs[0].text) for output in outputs[1::2])
    for output in outputs[::2]:
        agreement(alone, output.outputs[0].token_ids, NEAR_TIE)


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
                DeviceLost, match="was ended by SIGKILL" if number is signal.SIGKILL else "no sign of life for 10 s"
            ):
                llm.generate(prompts, greedy(4000), use_tqdm=False)
            assert time.monotonic() - killed[0] < limit_s
    assert all(map(has_ended, pids))


RANK_WITHOUT_MEMORY = """
import sys, time
from pathlib import Path
import torch
from radixkv.runtime.device.cuda.model_runner import ModelRunner
from radixkv.runtime.device.ranks import rank
enqueue = ModelRunner.enqueue
def enqueue_without_memory(self, step):
    if Path("{folder}/fails").exists():
        Path("{folder}/failed_at").write_text(str(time.monotonic()))
        {statement}
    return enqueue(self, step)
ModelRunner.enqueue = enqueue_without_memory
rank.main()
"""
TOO_MUCH = 1 << 46
"""Bytes, more than any GPU has."""


@pytest.mark.parametrize(
    "statement",
    [f"torch.empty({TOO_MUCH}, dtype=torch.uint8, device='cuda')", "raise MemoryError"],
    ids=["of the GPU", "of the host"],
)
def test_a_rank_that_runs_out_of_memory_under_load_ends_the_step_within_a_second(
    statement: str, sensitive_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's kernels wait for sums of it meanwhile. The process goes on, and can open the model again."""
    interpreter, script = tmp_path / "python", tmp_path / "full.py"
    script.write_text(RANK_WITHOUT_MEMORY.format(folder=tmp_path, statement=statement))
    interpreter.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {script} "$@"\n')
    interpreter.chmod(0o755)
    prompts = [random_ids(50, seed=n) for n in range(8)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(interpreter))
        with opened(sensitive_folder, **TWO) as llm:
            (pid,) = children(os.getpid(), str(script))
            llm.generate(prompts, greedy(8), use_tqdm=False)
            threading.Timer(0.5, (tmp_path / "fails").touch).start()
            with pytest.raises(DeviceLost, match="rank 1 of the model ended with exit code 1"):
                llm.generate(prompts, greedy(4000), use_tqdm=False)
            assert time.monotonic() - float((tmp_path / "failed_at").read_text()) < 1.0
            assert has_ended(pid)
    assert_that_two_gpus_answer(sensitive_folder, prompts)


def test_rank_0_that_runs_out_of_memory_under_load_ends_the_step_within_a_second(
    sensitive_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of the others wait for sums of it meanwhile."""
    before = set(children(os.getpid(), RANK))
    prompts = [random_ids(50, seed=n) for n in range(8)]
    enqueue, failed_at = ModelRunner.enqueue, []

    def enqueue_without_memory(self: ModelRunner, step: Any) -> Any:
        failed_at.append(time.monotonic())
        torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
        return enqueue(self, step)

    with opened(sensitive_folder, **TWO) as llm:
        (pid,) = set(children(os.getpid(), RANK)) - before
        llm.generate(prompts, greedy(8), use_tqdm=False)
        with monkeypatch.context() as patch:
            threading.Timer(0.5, patch.setattr, (ModelRunner, "enqueue", enqueue_without_memory)).start()
            with pytest.raises(DeviceLost, match="failed for all ranks of the model: .* too little memory"):
                llm.generate(prompts, greedy(4000), use_tqdm=False)
        assert time.monotonic() - failed_at[0] < 1.0
        assert has_ended(pid)
    assert_that_two_gpus_answer(sensitive_folder, prompts)


def assert_that_two_gpus_answer(model: Path, prompts: list[list[int]]) -> None:
    with opened(model, **TWO) as llm:
        outputs = llm.generate(prompts, greedy(8), use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


def test_wrong_numbers_of_gpus_are_refused(sensitive_folder: Path) -> None:
    before = children(os.getpid(), RANK)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \d+ needs as many GPUs, and torch sees \d"):
        opened(sensitive_folder, tensor_parallel_size=2 * torch.cuda.device_count()).__enter__()
    assert children(os.getpid(), RANK) == before
