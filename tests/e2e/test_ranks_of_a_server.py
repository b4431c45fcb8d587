"""What a server of a model that two ranks compute tells its clients about them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from radixkv.checkpoints import resolve
from support.device_support import load_oracle
from support.live import LiveServer, children, wait_for
from support.lora import linear_modules, save_adapter

Start = Callable[..., AbstractContextManager[LiveServer]]


@pytest.mark.nightly
def test_a_server_names_its_ranks(start: Start) -> None:
    with start("--device", "cpu", "--tensor-parallel-size", "2") as live:
        info = live.http.get("/server_info").json()
        assert (info["device"], info["tensor_parallel_size"]) == ("2 x cpu", 2)
        assert live.devices == "2 x cpu"
        assert live.metric("tensor_parallel_size") == 2
        assert live.complete(prompt=[1, 2, 3], max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.nightly
def test_a_rank_that_dies_in_an_idle_server_is_replaced_before_a_request_comes(start: Start) -> None:
    with start("--device", "cpu", "--tensor-parallel-size", "2", "--restart-runtime") as live:
        (rank,) = children(live.runtime_pid)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: live.http.get("/health").status_code == 503, "the loss is not noticed")
        wait_for(lambda: live.http.get("/health").status_code == 200, "the runtime is not started again")
        (live.runtime_pid,) = children(live.process.pid)
        assert live.metric("runtime_restarts_total") == 1
        assert live.complete(prompt=[1, 2, 3], max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.nightly
def test_adapters_of_ranks_are_there_again_after_a_rank_has_died(
    start: Start, sensitive: Path, tmp_path: Path
) -> None:
    """One adapter is there from the start, the other one is loaded; both answer as on one device."""
    oracle = load_oracle(resolve(str(sensitive)))
    for seed, name in enumerate(("sql", "law")):
        save_adapter(tmp_path / name, oracle, linear_modules(oracle), seed=seed, rank=5)
    names = ("sql", "law")
    flags = ("--device", "cpu", "--lora-modules", f"sql={tmp_path / 'sql'}", "--lora-dir", str(tmp_path))

    def answers(live: LiveServer) -> list[list[int]]:
        settings = {"prompt": [1, 2, 3], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        return [live.complete(model=name, **settings)["choices"][0]["token_ids"] for name in names]

    with start(*flags, "--lora-modules", *(f"{name}={tmp_path / name}" for name in names)) as live:
        expected = answers(live)
    with start(*flags, "--tensor-parallel-size", "2", "--restart-runtime") as live:
        live.http.post("/v1/load_lora_adapter", json={"lora_name": "law", "lora_path": "law"}).raise_for_status()
        assert answers(live) == expected
        (rank,) = children(live.runtime_pid)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: live.http.get("/health").status_code == 503, "the loss is not noticed")
        wait_for(lambda: live.http.get("/health").status_code == 200, "the runtime is not started again")
        (live.runtime_pid,) = children(live.process.pid)
        assert answers(live) == expected
        assert live.metric("loras_loaded") == 2
        live.http.post("/v1/unload_lora_adapter", json={"lora_name": "law"}).raise_for_status()
        assert live.complete(model="sql", prompt=[1, 2, 3], max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.nightly
def test_a_server_of_one_device_has_one_rank(server: LiveServer) -> None:
    info = server.http.get("/server_info").json()
    assert (info["device"], info["tensor_parallel_size"]) == ("cpu", 1)
    assert server.devices == "cpu"
    assert server.metric("tensor_parallel_size") == 1
