"""How ranks come to compute together, and what ends a start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from radixkv.checkpoints import resolve
from radixkv.errors import ConfigError, DeviceError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.machine import Gpu, Machine
from radixkv.runtime.device.ops.cpu.collectives import GlooCollectives
from radixkv.runtime.device.ranks import open as open_module
from radixkv.runtime.device.ranks import processes
from radixkv.runtime.device.ranks.processes import RankProcesses
from radixkv.runtime.device.resolved_config import ResolvedConfig, with_defaults
from radixkv.runtime.step.executor import Executor, PageOrigin
from radixkv.settings.config import EngineConfig, ModelConfig
from support.cases import rest_nightly
from support.processes import children, has_ended

RANK = "radixkv.runtime.device.ranks.rank"
EXECUTOR = (
    "device dtype kv_dtype n_pages vocab_size window has_windows n_states window_pool adapters uses_shared_runs "
    "is_asynchronous splits_drafts page_origin"
).split()


def of_ranks(n_ranks: int) -> ResolvedConfig:
    return with_defaults(EngineConfig(ModelConfig("tiny", tensor_parallel_size=n_ranks)), "cpu", 64)


def started(model: Path, settings: DeviceSettings) -> RankProcesses:
    ranks = RankProcesses.start(settings.tensor_parallel_size, "cpu")
    ranks.open(model, settings)
    return ranks


@pytest.mark.nightly
def test_a_rank_that_dies_before_it_loads_refuses_the_start() -> None:
    before = set(children(os.getpid(), RANK))
    ranks = RankProcesses.start(3, "cpu")
    try:
        pid = min(set(children(os.getpid(), RANK)) - before)
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)
        with pytest.raises(ConfigError, match="rank 1 of the model was ended by SIGKILL"):
            ranks.open(resolve("tiny").folder, of_ranks(3).device_settings)
    finally:
        ranks.close()
    assert set(children(os.getpid(), RANK)) == before


@pytest.mark.parametrize("has_flashinfer", rest_nightly([True, False], kept=(1,)))
def test_ranks_get_the_attention_backend_that_rank_0_chooses(
    has_flashinfer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each would choose by what it finds installed."""
    pytest.importorskip("triton")
    gpu = Gpu("NVIDIA H100", (9, 0), 80 << 30, 70 << 30)
    packages = {"flashinfer-python": "0.7.2" if has_flashinfer else None, "triton": "3.6.0"}
    machine = Machine("2.11.0", (13, 0), (13, 0), gpu, "", packages, True, None, None, "cc", True)
    resolved = with_defaults(EngineConfig(ModelConfig("tiny", tensor_parallel_size=2)), "cuda", 64, machine)
    assert resolved.device_settings.attention_backend == "auto"
    sent: list[str] = []
    monkeypatch.setattr("radixkv.runtime.device.cuda.factory.not_compiled", lambda *_: [])
    monkeypatch.setattr(RankProcesses, "open", lambda _, model, settings: sent.append(settings.attention_backend))

    def open_executor(*arguments: Any) -> Executor:
        sent.append(arguments[2].attention_backend)
        raise DeviceError("no GPU is here")

    monkeypatch.setattr(open_module, "open_executor", open_executor)
    with pytest.raises(ConfigError, match="no GPU is here"):
        open_module.open_ranks(resolved, resolve("tiny"))
    assert sent == ["flashinfer" if has_flashinfer else "triton"] * 2


def test_a_start_that_fails_when_rank_0_is_open_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(children(os.getpid(), RANK))
    left: list[set[int]] = []

    def open_executor(*_: object) -> Executor:
        for pid in set(children(os.getpid(), RANK)) - before:
            os.kill(pid, signal.SIGKILL)
        executor = SimpleNamespace(**dict.fromkeys(EXECUTOR))
        executor.page_origin = PageOrigin("cpu", "", "", "k v", "")
        executor.close = lambda: left.append(set(children(os.getpid(), RANK)) - before)
        return cast(Executor, executor)

    monkeypatch.setattr(open_module, "open_executor", open_executor)
    with pytest.raises(ConfigError, match="cannot start: rank 1 of the model was ended by SIGKILL; the lines"):
        open_module.open_ranks(of_ranks(2), resolve("tiny"))
    assert left == [set()], "closed once, when no rank is there that its kernels wait for"


@pytest.mark.nightly
def test_a_rank_that_refuses_is_named_with_its_device(tmp_path: Path) -> None:
    ranks = started(tmp_path, of_ranks(2).device_settings)
    try:
        with pytest.raises(ConfigError, match=rf"rank 1 \(cpu\): .*{tmp_path}"):
            ranks.minimum(0)
    finally:
        ranks.close()


@pytest.mark.nightly
def test_what_a_rank_refused_is_the_reason_of_a_start_that_failed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is why the devices of rank 0 and this rank did not connect."""
    before = set(children(os.getpid(), RANK))

    def open_executor(*_: object) -> Executor:
        (pid,) = set(children(os.getpid(), RANK)) - before
        assert has_ended(pid)
        raise DeviceError("the devices of the ranks do not connect")

    monkeypatch.setattr(open_module, "open_executor", open_executor)
    with pytest.raises(ConfigError, match=rf"^rank 1 \(cpu\): .*{tmp_path}"):
        open_module.open_ranks(of_ranks(2), replace(resolve("tiny"), folder=tmp_path))


def test_a_rank_that_hangs_while_it_loads_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_MAX_LATE_S", 0.1)
    before = set(children(os.getpid(), RANK))
    ranks = started(resolve("tiny").folder, of_ranks(2).device_settings)
    try:
        (pid,) = set(children(os.getpid(), RANK)) - before
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ConfigError, match=rf"rank 1 \(cpu\) does not get ready.* process {pid} "):
            ranks.minimum(0)
    finally:
        ranks.close()
    assert has_ended(pid)


@pytest.mark.nightly
def test_files_are_there_only_while_devices_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would remove them after a kill of all processes while they load, which takes the longest."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = started(resolve("tiny").folder, of_ranks(2).device_settings)
    try:
        assert list(tmp_path.iterdir()) == []
        with ranks.connecting() as store:
            (folder,) = tmp_path.iterdir()
            assert (folder, folder.stat().st_mode & 0o777) == (store.parent, 0o700)
            GlooCollectives(0, 2).connect(store, 60.0)
        assert list(tmp_path.iterdir()) == []
        ranks.wait_ready()
    finally:
        ranks.close()


RANK_0 = f"""
import os, socket, subprocess, sys, time
from radixkv.runtime.device.ranks.frames import Frames, RankStart, encode
from radixkv.runtime.device.resolved_config import with_defaults
from radixkv.settings.config import EngineConfig, ModelConfig
settings = with_defaults(EngineConfig(ModelConfig("tiny", tensor_parallel_size=2)), "cpu", 64).device_settings
sockets = [socket.socketpair() for _ in range(3)]
(ours, theirs), (_, their_copies), (_, their_adapters) = sockets
memory = os.memfd_create("memory")
inherited = [theirs.fileno(), their_copies.fileno(), memory, os.eventfd(0), their_adapters.fileno()]
subprocess.Popen([sys.executable, "-c", sys.argv[1], *map(str, inherited)], pass_fds=inherited)
Frames(ours).send(encode(RankStart(1, "{resolve("tiny").folder}", "cpu", settings, os.getpid())))
time.sleep(600)
"""
LOADING_FOR_EVER = """
import os, time
from radixkv.runtime.device.ranks import rank
def open_executor(*_):
    print(os.getpid(), flush=True)
    time.sleep(600)
rank.open_executor = open_executor
rank.main()
"""


@pytest.mark.nightly
def test_a_rank_that_still_loads_ends_with_a_process_that_is_killed() -> None:
    command = [sys.executable, "-c", RANK_0, LOADING_FOR_EVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        try:
            pid = int(rank_0.stdout.readline())
        finally:
            rank_0.kill()
    try:
        assert has_ended(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
