"""What rank 0 does when a rank ends, or a step hangs, on devices whose kernels wait for each other."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from radixkv.checkpoints import resolve
from radixkv.errors import ConfigError, DeviceError, DeviceLost
from radixkv.runtime.device.ranks import open as open_module
from radixkv.runtime.device.ranks import processes
from radixkv.runtime.device.ranks.fan_out import FanOut
from radixkv.runtime.device.ranks.frames import Frames, RankRefused, encode
from radixkv.runtime.device.ranks.processes import RankProcesses
from radixkv.runtime.device.resolved_config import with_defaults
from radixkv.runtime.step.executor import Executor, PageOrigin
from radixkv.runtime.step.plan import StepPlan
from radixkv.settings.config import EngineConfig, ModelConfig
from support.processes import children, has_ended

RANK = "radixkv.runtime.device.ranks.rank"


class Watched:
    """Ranks 1 and 2, which wait for ever, and whether rank 0 has given up."""

    def __init__(self) -> None:
        before = set(children(os.getpid(), RANK))
        self.ranks = RankProcesses.start(3, "cpu")
        self.pids = sorted(set(children(os.getpid(), RANK)) - before)
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        self.gave_up = threading.Event()
        self.ranks.watch(self.gave_up.set)


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.ranks.close()
    assert all(map(has_ended, watched.pids))


def test_the_end_of_a_rank_ends_all_waits(watched: Watched) -> None:
    fan_out = FanOut(cast(Executor, SimpleNamespace(**OF_AN_EXECUTOR)), watched.ranks, 3)
    fan_out.check()
    os.kill(watched.pids[0], signal.SIGKILL)
    assert watched.gave_up.wait(10.0)
    for ask in (fan_out.check, lambda: watched.ranks.send(b"a plan")):
        with pytest.raises(DeviceLost, match="rank 1 of the model was ended by SIGKILL"):
            ask()
    assert all(map(has_ended, watched.pids)), "the others wait in a step"


def test_a_step_that_hangs_ends_all_waits(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "COLLECTIVE_TIMEOUT_S", 0.1)
    message = "another rank of the model does not respond in 0.1 s"
    with pytest.raises(DeviceLost, match=message), watched.ranks.waiting():
        assert watched.gave_up.wait(10.0)
    assert all(map(has_ended, watched.pids))


def test_kernels_that_hang_in_the_start_end_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "COLLECTIVE_TIMEOUT_S", 0.1)
    watched = Watched()
    try:
        assert watched.gave_up.wait(10.0)
        assert all(map(has_ended, watched.pids))
        with pytest.raises(ConfigError, match="another rank of the model does not respond in 0.1 s"):
            watched.ranks.minimum(0)
    finally:
        watched.ranks.close()


def test_steps_that_end_in_time_are_no_loss(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are ranks that load, which may be silent for long."""
    monkeypatch.setattr(processes, "_MAX_SILENCE_S", 0.1)
    with watched.ranks.waiting():
        assert not watched.gave_up.wait(1.5)
    with watched.ranks.waiting():
        pass
    assert not watched.gave_up.is_set()


def test_kernels_that_wait_when_the_engine_is_closed_end(watched: Watched) -> None:
    """Otherwise the device could not be freed."""
    watched.ranks.close()
    assert watched.gave_up.is_set()
    assert all(map(has_ended, watched.pids))


def test_nothing_watches_ranks_that_are_closed() -> None:
    ranks = RankProcesses.start(1, "cpu")
    before = threading.active_count()
    ranks.watch(lambda: None)
    assert threading.active_count() == before + 1
    ranks.close()
    assert threading.active_count() == before


def test_ranks_are_killed_at_a_loss_that_nobody_watched_for() -> None:
    before = set(children(os.getpid(), RANK))
    ranks = RankProcesses.start(3, "cpu")
    pids = set(children(os.getpid(), RANK)) - before
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert "a step failed for all ranks of the model: a reason" in str(ranks.lost("a reason"))
        assert time.monotonic() - begun < 0.9, "no end is waited for, because no socket has ended"
        assert all(map(has_ended, pids)), "they wait in the step"
        assert "a reason" in str(ranks.start_error("another")), "not that they were killed"
    finally:
        ranks.close()


@pytest.mark.parametrize("kind", [DeviceError, DeviceLost])
def test_a_rank_that_dies_while_the_model_is_opened_refuses_the_start(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(children(os.getpid(), RANK))

    def open_executor(*_: object) -> Executor:
        for pid in set(children(os.getpid(), RANK)) - before:
            os.kill(pid, signal.SIGKILL)
        raise kind("the devices of the ranks do not connect")

    monkeypatch.setattr(open_module, "open_executor", open_executor)
    resolved = with_defaults(EngineConfig(ModelConfig("tiny", tensor_parallel_size=2)), "cpu", 64)
    with pytest.raises(ConfigError, match="cannot start: rank 1 of the model was ended by SIGKILL; the lines"):
        open_module.open_ranks(resolved, resolve("tiny"))
    assert set(children(os.getpid(), RANK)) == before


OF_AN_EXECUTOR: dict[str, Any] = dict.fromkeys(
    "dtype kv_dtype n_pages vocab_size window has_windows n_states window_pool adapters uses_shared_runs "
    "splits_drafts".split()
) | {"device": "a GPU", "is_asynchronous": True, "page_origin": PageOrigin("cuda", "", "", "k v", "")}


class FailingExecutor(SimpleNamespace):
    """A device that computes beside the host, whose steps fail when they are launched."""

    def launch(self, plan: StepPlan) -> Any:
        raise DeviceError(f"step {plan.step}: there is too little memory")


def test_a_step_that_fails_here_is_lost_on_all_ranks(watched: Watched) -> None:
    executor = FailingExecutor(**OF_AN_EXECUTOR)
    fan_out = FanOut(cast(Executor, executor), watched.ranks, 3)
    assert (fan_out.n_ranks, fan_out.device) == (3, "a GPU")
    with pytest.raises(DeviceLost, match="a step failed for all ranks of the model: step 7: there is too little"):
        fan_out.launch(StepPlan(7, ()))
    assert watched.gave_up.is_set()
    assert all(map(has_ended, watched.pids))


def test_a_launch_that_hangs_is_lost(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's queue is full of steps that wait for a rank."""
    monkeypatch.setattr(processes, "COLLECTIVE_TIMEOUT_S", 0.1)
    executor = SimpleNamespace(**OF_AN_EXECUTOR)
    executor.launch = lambda plan: watched.gave_up.wait(10.0)
    with pytest.raises(DeviceLost, match="another rank of the model does not respond in 0.1 s"):
        FanOut(cast(Executor, executor), watched.ranks, 3).launch(StepPlan(0, ()))
    assert all(map(has_ended, watched.pids))


def test_a_rank_that_refuses_is_heard_before_one_that_waits_for_it(watched: Watched) -> None:
    """Rank 1 hangs; rank 2 cannot compute, says so and ends."""
    refused, waits = (Frames(one) for one in socket.socketpair())
    watched.ranks._frames[1].close()
    watched.ranks._frames[1] = waits
    refused.send(encode(RankRefused("there is too little memory")))
    os.kill(watched.pids[1], signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"rank 2 \(cpu\): there is too little memory"):
        watched.ranks.minimum(0)
    refused.close()
