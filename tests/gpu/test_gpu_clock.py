"""The device's times of steps and of their attention, against CUDA events and the engine's own clock."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_drive import Drive, executor_of
from gpu_support import family, greedy, needs_flashinfer, opened, save
from torch import Tensor

from radixkv import LLM
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import PendingStep, RunningStep

pytestmark = needs_flashinfer

N_ROWS, LENGTH = 32, 8000
N_LAYERS = 5
SLEEP_CYCLES = 5_000_000
"""Some milliseconds, in which the host enqueues the timed work, so that it runs without gaps."""


@pytest.mark.parametrize("is_graph", [False, True])
def test_attention_seconds_are_those_of_cuda_events(is_graph: bool) -> None:
    """Times long decode rows. All graph replays are enqueued before the first time is read."""
    from attention_world import World, ints

    from radixkv.runtime.device.attention.cuda.base import AttentionShape
    from radixkv.runtime.device.cuda.attention_timer import AttentionTimer

    world = World(
        AttentionShape(32, 8, 128, 16, torch.bfloat16, 128**-0.5, torch.bfloat16),
        [None] * N_LAYERS,
        max_rows=N_ROWS,
        width=512,
        n_pages=16_384,
    )
    for batch_slot in range(N_ROWS):
        world.fill(batch_slot, LENGTH)
    times = torch.zeros(2, dtype=torch.int64, device="cuda")
    timer = AttentionTimer(N_LAYERS, times)
    q = world.queries(N_ROWS)
    out = torch.empty_like(q)
    batch_slots = ints(range(N_ROWS))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        staged = world.staging.stage()
        step = world.attention.plan_decode(staged, batch_slots, np.full_like(batch_slots, LENGTH))
        world.staging.send(staged)
        attention = timer.timed(world.attention.step(step, None))

        def body() -> None:
            for layer in range(N_LAYERS):
                attention.run(layer, q, world.k, world.v, out)

        body()
        stream.synchronize()
        run = body
        if is_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                body()
            run = graph.replay

        torch.cuda._sleep(SLEEP_CYCLES)
        copies: list[Tensor] = []
        events = [torch.cuda.Event(enable_timing=True)]
        events[0].record(stream)
        for _ in range(10):
            run()
            copies.append(torch.empty(2, dtype=torch.int64, pin_memory=True).copy_(times, non_blocking=True))
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record(stream)
        stream.synchronize()

    measured = [timer.seconds(copy.numpy()) for copy in copies]
    expected = [one.elapsed_time(other) / 1e3 for one, other in pairwise(events)]
    assert measured == pytest.approx(expected, rel=0.3)


def record_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[PendingStep]:
    """Returns a list that gets every step that is launched from now on."""
    steps: list[PendingStep] = []
    launch = executor_of(llm).launch

    def recorded_launch(plan: StepPlan) -> RunningStep:
        running = launch(plan)
        steps.append(running.finish(None))  # finished at its launch, since no row is masked
        return running

    monkeypatch.setattr(executor_of(llm), "launch", recorded_launch)
    return steps


@pytest.mark.parametrize("n_layers", [1, 4])
def test_overlapping_steps_report_their_own_times(
    tmp_path: Path, n_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of graphs and prompt steps are never negative; their sums are the engine's, below step time."""
    with opened(save(tmp_path, num_hidden_layers=n_layers)) as llm:
        steps = record_steps(llm, monkeypatch)
        drive = Drive(llm, checks=False)
        for number, prompt in enumerate(family(60, seed=2)):
            drive.submit(f"{number}", prompt, greedy(100))
            for _ in range(3):
                drive.turn()
        drive.run()
        stats = drive.check_all_ended()
        results = [step.result() for step in steps]
    seconds = [result.attention_seconds for result in results]
    assert len(seconds) == stats.steps_total > 200
    assert min(seconds) >= 0
    assert len(set(seconds)) > 20, "steps report the time of another step"
    assert sum(seconds) == pytest.approx(stats.attention_seconds)
    assert 0 < stats.attention_seconds < stats.step_seconds
    assert min(result.device_seconds for result in results) > 0
    assert sum(result.device_seconds for result in results) == pytest.approx(stats.device_busy_seconds)
    assert stats.device_busy_seconds < stats.step_seconds, "steps overlap"


def test_a_step_takes_as_long_however_late_the_host_takes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = 0.1
    with opened(save(tmp_path)) as llm:
        drive = Drive(llm, checks=False)
        drive.submit("first", family(1, seed=2)[0], greedy(20))
        drive.run()
        steps = record_steps(llm, monkeypatch)
        drive.submit("second", family(1, seed=2)[0], greedy(20))
        for _ in range(25):
            drive.turn()
            time.sleep(late_s)
        drive.run()
        drive.check_all_ended()
        results = [step.result() for step in steps]
    assert len(results) >= 20
    assert all(0 < result.device_seconds < late_s / 4 for result in results)
