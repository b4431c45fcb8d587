"""Tests of the API key in every command that talks to a server: from a flag, a file or the environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.cli import main
from radixkv.client.http import HTTPClient
from radixkv.processes.server_process import running_server
from support.fake_openai import FakeServer

KEY = "secret-0123"
TREE = {
    "model": "m",
    "time": 1.0,
    "page_size": 16,
    "load": {"running": 0, "waiting": 0, "max_running": 4},
    "totals": {"prefix_queries": 0, "prefix_hits": 0, "generation_tokens": 0, "pages_evicted": 0, "preemptions": 0},
    "tiers": {"device": {"capacity": 4, "free": 4, "pages": 0, "nodes": []}},
}
COMMANDS = {
    "chat": [],
    "explain": ["some text"],
    "doctor": [],
    "top": ["--once"],
    "bench": ["--workload", "fewshot", "--num-prompts", "1", "--warmup-requests", "0", "--max-concurrency", "1"],
}


@pytest.fixture
def guarded(fake: FakeServer, type_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A server that wants a key."""
    type_in("hello\n")
    monkeypatch.delenv("RADIXKV_API_KEY", raising=False)
    fake.key = KEY
    fake.responses = {
        "/cache/doctor": lambda _: {"text": "nothing was lost", "misses": []},
        "/cache/explain": lambda _: {"text": "none", "cached_tokens": 0},
        "/cache/tree": lambda _: TREE,
    }
    if_chat = [{"choices": [{"delta": {"content": "Good day"}, "finish_reason": "stop"}]}]
    fake.responses["/v1/chat/completions"] = lambda body: if_chat
    return fake


@pytest.mark.parametrize("source", ["flag", "file", "environment"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_sends_the_key(
    guarded: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, source: str
) -> None:
    flags = ["--base-url", guarded.address, *COMMANDS[command]]
    if source == "flag":
        flags += ["--api-key", KEY]
    elif source == "file":
        (tmp_path / "key").write_text(KEY + "\n")
        flags += ["--api-key-file", str(tmp_path / "key")]
    else:
        monkeypatch.setenv("RADIXKV_API_KEY", KEY)
    if command == "bench":
        del guarded.responses["/v1/chat/completions"]
    assert main([command, *flags]) == 0
    assert {key for _, _, key in guarded.requests} == {f"Bearer {KEY}"}


@pytest.mark.parametrize("command", ["explain", "doctor", "top"])
def test_without_the_key_the_error_says_how_to_give_it(
    guarded: FakeServer, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "--base-url", guarded.address, *COMMANDS[command]]) == 1
    shown = capsys.readouterr().err
    assert all(way in shown for way in ("401", "--api-key,", "--api-key-file", "RADIXKV_API_KEY"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(
    guarded: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "key").write_text("first-key\nsecond-key\n")
    flags = [command, "--base-url", guarded.address, *COMMANDS[command]]
    for wrong in (["--api-key-file", str(tmp_path / "key")], ["--api-key-file", str(tmp_path / "no")]):
        assert main([*flags, *wrong]) == 1
        shown = capsys.readouterr().err
        assert "first-key" not in shown
        assert "api_key must be" in shown or "cannot be read" in shown
    assert guarded.requests == []
    with pytest.raises(SystemExit):
        main([*flags, "--api-key", "a", "--api-key-file", "b"])


@pytest.mark.nightly
def test_a_server_that_a_command_starts_for_itself_has_no_key_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RADIXKV_API_KEY", KEY)

    async def models() -> bytes:
        flags = ["--device=cpu", "--max-total-tokens=1024", "--grammar-backend=none"]
        async with running_server(flags) as address, HTTPClient(address) as client:
            return await client.request("GET", "/v1/models")

    assert b"tiny" in asyncio.run(models())
    assert os.environ["RADIXKV_API_KEY"] == KEY
