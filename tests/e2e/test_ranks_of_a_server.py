"""What a server of a model that two ranks compute tells its clients about them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from support.live import LiveServer, children, wait_for

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


def test_a_server_of_one_device_has_one_rank(server: LiveServer) -> None:
    info = server.http.get("/server_info").json()
    assert (info["device"], info["tensor_parallel_size"]) == ("cpu", 1)
    assert server.devices == "cpu"
    assert server.metric("tensor_parallel_size") == 1
