"""What a server of a model that two ranks compute tells its clients about them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from support.live import LiveServer

Start = Callable[..., AbstractContextManager[LiveServer]]


@pytest.mark.nightly
def test_a_server_names_its_ranks(start: Start) -> None:
    with start("--device", "cpu", "--tensor-parallel-size", "2") as live:
        info = live.http.get("/server_info").json()
        assert (info["device"], info["tensor_parallel_size"]) == ("2 x cpu", 2)
        assert live.devices == "2 x cpu"
        assert live.metric("tensor_parallel_size") == 2
        assert live.complete(prompt=[1, 2, 3], max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_server_of_one_device_has_one_rank(server: LiveServer) -> None:
    info = server.http.get("/server_info").json()
    assert (info["device"], info["tensor_parallel_size"]) == ("cpu", 1)
    assert server.devices == "cpu"
    assert server.metric("tensor_parallel_size") == 1
