"""The log of requests: what its lines say of requests that end in every way, and what they never say."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.errors import ConfigError
from radixkv.frontend.metrics.request_log import RequestLog, open_request_log
from support.live import LIMIT_S
from support.scripted_runtime import DISK, FAILS_AFTER_THREE, FAILS_AT_ONCE, HOST, Site
from support.site_requests import asks

SECRET = "QQQQQQQQ"


class Lines:
    """Takes lines, and gives them when they have come."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def take(self, count: int = 1) -> list[dict[str, Any]]:
        """Waits for ``count`` lines and takes them."""
        limit = time.monotonic() + LIMIT_S
        while len(self.texts) < count and time.monotonic() < limit:
            time.sleep(0.005)
        assert all(text.endswith(b"\n") and text.count(b"\n") == 1 for text in self.texts)
        lines, self.texts[:] = [json.loads(text) for text in self.texts], []
        assert len(lines) == count
        return lines


@pytest.fixture
def lines(site: Site) -> Iterator[Lines]:
    lines = Lines()
    site.client.on_end.append(RequestLog("echo", lines.texts.append).add)
    yield lines
    site.client.on_end.clear()


def post(site: Site, path: str, **body: Any) -> httpx.Response:
    return site.http.post(path, json=body)


def test_a_line_has_what_the_reply_has(site: Site, lines: Lines) -> None:
    site.loop.host = HOST
    site.loop.disk = DISK
    whole = post(site, "/v1/completions", prompt=list(range(10, 20)), max_tokens=4)
    reply = whole.json()
    (line,) = lines.take()
    assert line.pop("request_id") == whole.headers["x-request-id"]
    assert 0 <= line.pop("ttft_s") <= line.pop("e2e_s") < LIMIT_S
    assert line.pop("time")[-6:] == "+00:00"
    assert reply["id"] == "cmpl-" + line.pop("id")
    assert line == {
        "route": "/v1/completions",
        "model": "echo",
        "prompt_tokens": 10,
        "cached_tokens": {"device": 4, "host": 0, "storage": 1},
        "completion_tokens": 4,
        "queue_s": 0.25,
        "load_s": 0.15,
        "finish_reason": "length",
        "error": None,
        "client_disconnected": False,
        "priority": 0,
        "tenant": None,
        "cache_salt_hash": None,
    }


PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/responses": "resp_", "/v1/messages": "msg_", "/generate": ""}


@pytest.mark.parametrize(("path", "prefix"), PREFIXES.items())
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_has_its_line_without_any_text(
    site: Site, lines: Lines, path: str, prefix: str, stream: bool
) -> None:
    reply = post(site, path, **asks(SECRET, 16)[path], stream=stream)
    assert reply.status_code == 200
    assert "Q" in reply.text, "the answer repeats the prompt"
    (line,) = lines.take()
    assert "Q" not in json.dumps(line)
    assert (line["route"], line["finish_reason"]) == (path, "length")
    assert line["request_id"] == reply.headers["x-request-id"]
    assert f'"{prefix}{line["id"]}"' in reply.text


def test_each_prompt_has_its_line_and_its_choices_share_it(site: Site, lines: Lines) -> None:
    reply = post(site, "/v1/completions", prompt=[[1, 2], [3, 4, 5]], n=2, max_tokens=3, stop_token_ids=[4]).json()
    first, second = lines.take(2)
    assert (first["id"], second["id"]) == (reply["id"].removeprefix("cmpl-"), first["id"] + "-1")
    assert (first["prompt_tokens"], first["finish_reason"]) == (2, "length")
    assert (second["prompt_tokens"], set(second["finish_reason"].split(","))) == (3, {"stop"})
    assert first["completion_tokens"] + second["completion_tokens"] == reply["usage"]["completion_tokens"]


@pytest.mark.parametrize(("token", "code"), [(FAILS_AT_ONCE, "queue_full"), (FAILS_AFTER_THREE, "numerical_error")])
def test_a_failed_request_has_the_code_of_its_reply(site: Site, lines: Lines, token: int, code: str) -> None:
    reply = post(site, "/v1/completions", prompt=[token, 1], max_tokens=9)
    (line,) = lines.take()
    assert line["error"] == reply.json()["error"]["code"] == code
    assert (line["finish_reason"], line["client_disconnected"], line["queue_s"]) == (None, False, None)
    assert (line["ttft_s"] is None) == (code == "queue_full")


def test_a_client_that_leaves_is_named(site: Site, lines: Lines) -> None:
    site.loop.step_s = 0.01
    body = {"prompt": [1, 2, 3], "max_tokens": 400, "stream": True}
    with site.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    (line,) = lines.take()
    assert line["client_disconnected"]
    assert (line["finish_reason"], line["error"], line["cached_tokens"]) == (None, None, None)
    assert 0 < line["completion_tokens"] < 400


def test_a_salt_is_only_told_apart(site: Site, lines: Lines) -> None:
    for salt in ("alice", "bob", "alice"):
        post(site, "/v1/completions", prompt=[1], max_tokens=1, cache_salt=salt)
    first, other, again = (line["cache_salt_hash"] for line in lines.take(3))
    assert first == again != other
    elsewhere = Lines()
    site.client.on_end.append(RequestLog("echo", elsewhere.texts.append).add)
    post(site, "/v1/completions", prompt=[1], max_tokens=1, cache_salt="alice")
    (line,) = elsewhere.take()
    assert line["cache_salt_hash"] not in (None, first), "each server has a key of its own"


def test_a_priority_is_shown_and_health_checks_are_not(site: Site, lines: Lines) -> None:
    assert site.http.get("/health_generate").status_code == 200
    post(site, "/generate", input_ids=[1], sampling_params={"max_new_tokens": 1}, rid="mine")
    (line,) = lines.take()
    assert (line["route"], line["priority"]) == ("/generate", 0)


def test_a_full_disk_fails_no_request_and_is_told_once(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[bytes] = []
    is_full = True

    def write(line: bytes) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        taken.append(line)

    site.client.on_end.append(RequestLog("echo", write).add)
    try:
        for _ in range(3):
            assert post(site, "/v1/completions", prompt=[1], max_tokens=1).status_code == 200
        is_full = False
        assert post(site, "/v1/completions", prompt=[1], max_tokens=1).status_code == 200
        site.call(site.client.idle())
    finally:
        site.client.on_end.clear()
    assert len(taken) == 1
    assert capsys.readouterr().err.count("No space left") == 1


def test_lines_are_appended_to_a_file(tmp_path: Path) -> None:
    for _ in range(2):
        with open_request_log(str(tmp_path / "requests.jsonl")) as write:
            write(b"{}\n")
            assert (tmp_path / "requests.jsonl").read_bytes().endswith(b"{}\n"), "at once"
    assert (tmp_path / "requests.jsonl").read_bytes() == b"{}\n{}\n"


def test_a_part_of_a_line_is_not_continued_by_the_next(tmp_path: Path) -> None:
    """A disk that is nearly full takes the beginning of a line."""
    path = tmp_path / "requests.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_request_log(str(path)) as write:
        write(b"{}\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (7, before[1]))
        try:
            for _ in range(2):
                with pytest.raises(OSError, match=r"space|too large"):
                    write(b'{"id": 1}\n')
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        write(b'{"id": 2}\n')
        write(b'{"id": 3}\n')
    assert path.read_bytes() == b'{}\n{"id\n{"id": 2}\n{"id": 3}\n'


def test_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with open_request_log("-") as write:
        write(b"{}\n")
    assert capfd.readouterr().err == "{}\n"


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--request-log"), open_request_log(str(tmp_path)):
        pass


def test_a_pipe_that_nobody_reads_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="--request-log"), open_request_log(str(path)):
        pass
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with open_request_log(str(path)) as write:
            write(b"{}\n")
            assert os.read(reader, 100) == b"{}\n"
            with pytest.raises(OSError, match="temporarily unavailable|space"):
                write(bytes(1 << 20))  # more than the pipe holds
    finally:
        os.close(reader)
