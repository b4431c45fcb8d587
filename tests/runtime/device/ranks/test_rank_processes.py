"""Ranks in processes of their own: how they start, compute, end and die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutputs
from radixkv.errors import ConfigError, DeviceLost
from radixkv.runtime.device.ranks import processes
from radixkv.runtime.device.sampling.cpu import Sampler
from support.cases import rest_nightly
from support.processes import children, has_ended

RANK = "radixkv.runtime.device.ranks.rank"
PROMPTS = ["A story of a lighthouse keeper and", "Question: 3 plus 4?", "A story of a lighthouse in"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=24, seed=7, n=2, presence_penalty=0.5)

SCORED = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, logit_bias={7: 2.0})
MASKED = SamplingParams(
    temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputs(json={"type": "boolean"})
)


def ranks() -> set[int]:
    return set(children(os.getpid(), RANK))


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    before = ranks()
    with LLM("tiny", device="cpu", tensor_parallel_size=2, max_total_tokens=4096) as llm:
        (pid,) = ranks() - before
        yield llm
    assert has_ended(pid)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("host_memory_bytes", "n_starts"), rest_nightly([(8 << 20, 1), (8 << 20, 3), (None, 3)], kept=(0,))
)
def test_ranks_end_without_an_error(
    host_memory_bytes: int | None, n_starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    wait = subprocess.Popen.wait

    def noted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        codes.append(wait(process, timeout))
        return codes[-1]

    monkeypatch.setattr(subprocess.Popen, "wait", noted)
    for _ in range(n_starts):
        LLM(
            "tiny", device="cpu", tensor_parallel_size=2, max_total_tokens=4096, host_memory_bytes=host_memory_bytes
        ).shutdown()
    assert len(codes) >= n_starts
    assert set(codes) == {0}


@pytest.mark.nightly
def test_a_rank_that_stops_in_the_middle_of_a_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that only loads launches no step, in which a stopped rank would be noticed."""
    prompts = [f"Story {i}: " + "the keeper walked along the shore. " * 12 for i in range(5)]
    settings: dict[str, Any] = {"max_total_tokens": 512, "host_memory_bytes": 32 << 20}
    monkeypatch.setattr(processes, "_MAX_SILENCE_S", 2.0)
    before = ranks()
    with LLM("tiny", device="cpu", tensor_parallel_size=2, **settings) as llm:
        (pid,) = ranks() - before
        for prompt in prompts:
            llm.generate(prompt, GREEDY, use_tqdm=False)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeviceLost, match="rank 1 of the model has given no sign of life for 2 s"):
            llm.generate(prompts[0], GREEDY, use_tqdm=False)
    assert has_ended(pid)


def test_answers_are_those_of_one_device(two: LLM) -> None:
    with LLM("tiny", device="cpu", max_total_tokens=4096) as one:
        for params in (GREEDY, SAMPLED, SCORED, MASKED):
            expected, found = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (one, two))
            assert [tokens(output) for output in found] == [tokens(output) for output in expected]
            for before, after in zip(expected, found, strict=True):
                assert logprobs(after) == pytest.approx(logprobs(before), abs=1e-4)
        beams = BeamSearchParams(beam_width=3, max_tokens=8)
        (expected_beams,), (found_beams,) = (llm.beam_search(PROMPTS[:1], beams) for llm in (one, two))
        assert [beam.tokens for beam in found_beams.sequences] == [beam.tokens for beam in expected_beams.sequences]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [list(choice.token_ids) for choice in output.outputs]


def logprobs(output: RequestOutput) -> list[float]:
    """Returns those of the answer's tokens and of the prompt's."""
    chosen = zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=False)
    prompt = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
    return [of_token[token].logprob for token, of_token in (*chosen, *prompt) if of_token]


def test_warm_answers_are_equal_to_the_bit(two: LLM) -> None:
    two.flush_cache()
    cold, warm = (two.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2))
    assert [one.num_cached_tokens for one in cold] != [one.num_cached_tokens for one in warm]
    for before, after in zip(cold, warm, strict=True):
        assert before.outputs[0].token_ids == after.outputs[0].token_ids
        assert before.outputs[0].logprobs == after.outputs[0].logprobs


@pytest.mark.parametrize(("n_ranks", "n_others"), rest_nightly([(2, 1), (4, 2)], kept=()))
def test_pages_come_back_from_host_memory_and_disk(n_ranks: int, n_others: int, tmp_path: Path) -> None:
    """With four ranks, two have the same KV head. Another number of ranks finds no pages, also of the same size."""
    prompts = [f"Story {i}: " + "the keeper walked along the shore. " * 12 for i in range(5)]
    settings: dict[str, Any] = {"max_total_tokens": 512, "host_memory_bytes": 32 << 20, "cache_dir": tmp_path}

    def answer(llm: LLM) -> list[RequestOutput]:
        return [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]

    with LLM("tiny", device="cpu", tensor_parallel_size=n_ranks, **settings) as llm:
        cold, warm = answer(llm), answer(llm)
        with pytest.raises(DeviceLost):
            kill_while_pages_are_copied(llm, prompts)
    with LLM("tiny", device="cpu", tensor_parallel_size=n_ranks, **settings) as llm:
        from_disk = answer(llm)
    with LLM("tiny", device="cpu", tensor_parallel_size=n_others, **settings) as llm:
        of_others = answer(llm)
    assert all(one.num_cached_tokens < 16 for one in (cold[0], of_others[0]))
    for before, *later in zip(cold, warm, from_disk, strict=True):
        for after in later:
            assert after.num_cached_tokens > len(after.prompt_token_ids) - 16 > 16
            assert after.outputs[0].token_ids == before.outputs[0].token_ids
            assert after.outputs[0].logprobs == before.outputs[0].logprobs


def kill_while_pages_are_copied(llm: LLM, prompts: list[str]) -> None:
    """Kills a rank beside steps that copy pages in both directions."""
    pid = max(ranks())
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_a_rank_that_dies_or_hangs_ends_the_step(number: signal.Signals) -> None:
    before = ranks()
    llm = LLM("tiny", device="cpu", tensor_parallel_size=2, max_total_tokens=4096)
    (pid,) = ranks() - before
    try:
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        os.kill(pid, number)
        begun = time.monotonic()
        cause = "was ended by SIGKILL" if number is signal.SIGKILL else "has given no sign of life for 10 s"
        with pytest.raises(DeviceLost, match=f"rank 1 of the model {cause}"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert time.monotonic() - begun < (9.0 if number is signal.SIGKILL else 20.0)
    finally:
        llm.shutdown()
    assert has_ended(pid)


RANK_WITHOUT_MEMORY = """
import sys, time
from pathlib import Path
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.ranks import rank
original = CpuExecutor.{method}
def fail(self, *arguments):
    if Path("{folder}/fails").exists():
        Path("{folder}/failed_at").write_text(str(time.monotonic()))
        raise {error}
    return original(self, *arguments)
CpuExecutor.{method} = fail
rank.main()
"""


@pytest.mark.parametrize(
    ("method", "error"),
    rest_nightly(
        [
            ("_compute", "MemoryError()"),
            ("launch", "MemoryError()"),
            ("_compute", "RuntimeError('DefaultCPUAllocator: can not allocate memory')"),
        ],
        kept=(),
    ),
)
def test_a_rank_without_memory_ends_the_step_for_all(
    method: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    (tmp_path / "full.py").write_text(RANK_WITHOUT_MEMORY.format(method=method, folder=tmp_path, error=error))
    interpreter.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path / "full.py"} "$@"\n')
    interpreter.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(interpreter))
        llm = LLM("tiny", device="cpu", tensor_parallel_size=2, max_total_tokens=4096)
    try:
        (pid,) = (child for child in children(os.getpid(), str(tmp_path / "full.py")))
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        (tmp_path / "fails").touch()
        with pytest.raises(DeviceLost, match="rank 1 of the model ended with exit code 1"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        late_s = time.monotonic() - float((tmp_path / "failed_at").read_text())
        assert late_s < 5.0, "within a second where other work does not delay it"
    finally:
        llm.shutdown()
    assert has_ended(pid)


def test_a_step_in_which_rank_0_takes_long_is_no_loss(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait meanwhile, and give signs of life."""
    monkeypatch.setattr(processes, "_MAX_SILENCE_S", 2.0)
    sample = Sampler.sample

    def sample_late(*arguments: Any) -> Any:
        time.sleep(4.0)
        return sample(*arguments)

    monkeypatch.setattr(Sampler, "sample", sample_late)
    (output,) = two.generate(PROMPTS[:1], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


LATE_RANK = """
import sys, time
from radixkv.runtime.device.ops.cpu.collectives import GlooCollectives
from radixkv.runtime.device.ranks import rank
add = GlooCollectives.sum
delays_s = [12.0]
def add_late(self, partial):
    if partial.numel() > 1 and delays_s:  # of a step, and not the sum with which ranks connect
        time.sleep(delays_s.pop())
    return add(self, partial)
GlooCollectives.sum = add_late
rank.main()
"""


@pytest.mark.nightly
def test_a_step_in_which_another_rank_takes_long_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a rank may be silent."""
    interpreter = tmp_path / "python"
    (tmp_path / "late.py").write_text(LATE_RANK)
    interpreter.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path / "late.py"} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with LLM("tiny", device="cpu", tensor_parallel_size=2, max_total_tokens=4096) as llm:
        begun = time.monotonic()
        (output,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        assert time.monotonic() - begun > 12.0, "the rank was late"
        assert output.outputs[0].token_ids


SLEEPER = """
import time
from radixkv import LLM
llm = LLM("tiny", device="cpu", tensor_parallel_size=2, max_total_tokens=4096)
print("open", flush=True)
time.sleep(600)
"""


@pytest.mark.nightly
def test_ranks_end_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            (pid,) = children(process.pid, RANK)
        finally:
            process.kill()
    assert has_ended(pid)


SERVICE = """
import signal
from radixkv import LLM, SamplingParams
got_signals = []
signal.signal(signal.SIGTERM, lambda number, _: got_signals.append(number))
params = SamplingParams(temperature=0.0, max_tokens=16)
llm = LLM("tiny", device="cpu", tensor_parallel_size=2, max_total_tokens=4096)
print("open", flush=True)
for _ in range(2):  # the signal comes in a request of the first round
    while True:
        llm.generate("A story of", params, use_tqdm=False)
        if got_signals:
            break
llm.shutdown()
print("answered", flush=True)
"""


@pytest.mark.nightly
def test_a_signal_to_all_processes_lets_requests_end() -> None:
    """A service manager sends SIGTERM to all processes of a service; rank 0 answers its requests before it ends."""
    command = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            (pid,) = children(process.pid, RANK)
            os.killpg(process.pid, signal.SIGTERM)
            assert process.stdout.read() == "answered\n"
            assert process.wait() == 0
        finally:
            process.kill()
    assert has_ended(pid)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide num_attention_heads, 4"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size 0 must be"),
    ({"tensor_parallel_size": 2, "host_memory_bytes": 1000}, "host tier of 1000 bytes is less than one page"),
    ({"tensor_parallel_size": 2, "quantization": "fp8"}, "'fp8' needs a GPU"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("settings", "message"), rest_nightly(REFUSED, kept=(0,)))
def test_what_ranks_do_not_do_is_refused(settings: dict[str, object], message: str) -> None:
    before = ranks()
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", device="cpu", **settings)  # type: ignore[arg-type]
    assert ranks() == before
