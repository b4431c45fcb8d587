from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.errors import Draining
from radixkv.frontend.served_model import ServedModel
from support import site_requests
from support.live import LIMIT_S, wait_for
from support.running_site import running_site
from support.scripted_runtime import EOS, FAILS_AFTER_THREE, MAX_MODEL_LEN, Site
from support.site_requests import COMPLETIONS_HEAD, asks, events

stream = partial(events, path="/v1/completions")


def post(site: Site, **body: Any) -> httpx.Response:
    return site.http.post("/v1/completions", json=body)


def test_a_completion_has_all_fields_that_openai_clients_read(site: Site) -> None:
    body = post(site, model="echo", prompt="hello", max_tokens=7, temperature=0).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "echo"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "hellohe", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "hello", "max_tokens": 9},
        {"prompt": "hé😀", "max_tokens": 17},
        {"prompt": "hello world", "max_tokens": 40, "stop": "o w"},
        {"prompt": "hello world", "max_tokens": 40, "stop": ["zz", "rldh"]},
        {"prompt": "hello world", "max_tokens": 5, "stop": "o world"},
        {"prompt": [1, 2, 3], "max_tokens": 4},
        {"prompt": [70, 71, EOS, 72], "max_tokens": 9},
        {"prompt": [70, 71, EOS, 72], "max_tokens": 9, "ignore_eos": True},
        {"prompt": [70, 71, 72], "max_tokens": 9, "stop_token_ids": [72]},
        {"prompt": ["abc", "de", "f"], "max_tokens": 8},
    ],
)
def test_streaming_equals_not_streaming(site: Site, body: dict[str, Any]) -> None:
    whole = post(site, **body, return_token_ids=True).json()
    events = stream(site, **body, return_token_ids=True, stream_options={"include_usage": True})
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    for expected in whole["choices"]:
        pieces = [e["choices"][0] for e in events if e["choices"][0]["index"] == expected["index"]]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        assert [token for piece in pieces for token in piece["token_ids"]] == expected["token_ids"]
        assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [expected["finish_reason"]]
        assert [p["prompt_token_ids"] for p in pieces if "prompt_token_ids" in p] == [expected["prompt_token_ids"]]


def test_a_character_is_never_split(site: Site) -> None:
    pieces = [event["choices"][0]["text"] for event in stream(site, prompt="😀é", max_tokens=60)]
    assert "".join(pieces) == "😀é" * 10
    assert all("�" not in piece for piece in pieces)
    cut = stream(site, prompt="😀é", max_tokens=2)
    assert "".join(event["choices"][0]["text"] for event in cut) == "�"


def test_usage_is_streamed_only_on_request(site: Site) -> None:
    assert all("usage" not in event for event in stream(site, prompt="ab", max_tokens=3))


def test_a_stop_string_ends_the_answer_and_the_request(site: Site) -> None:
    body = post(site, prompt="hello world", max_tokens=400, stop="wor", return_token_ids=True).json()
    choice = body["choices"][0]
    assert choice["text"] == "hello "
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == len("hello wor") == body["usage"]["completion_tokens"]
    assert site.loop.submitted[-1].id == site.loop.cancelled[-1]


def test_a_stop_token_is_not_in_the_text(site: Site) -> None:
    choice = post(site, prompt=[70, 71, 72], stop_token_ids=[72], return_token_ids=True).json()["choices"][0]
    expected = post(site, prompt=[70, 71], max_tokens=2).json()["choices"][0]["text"]
    assert choice["text"] == expected
    assert choice["token_ids"] == [70, 71, 72]
    assert choice["finish_reason"] == "stop"


def test_choices_are_in_the_order_of_prompts(site: Site) -> None:
    prompts = [f"{i:02d}" for i in range(64)]
    choices = post(site, prompt=prompts, max_tokens=2).json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate(prompts))


def test_defaults_reach_the_runtime(site: Site) -> None:
    post(site, prompt="ab")
    submit = site.loop.submitted[-1]
    assert submit.sampling.max_tokens == 16
    assert submit.sampling.temperature == 1.0
    assert submit.sampling.seed is None
    assert (submit.namespace.cache_salt, submit.reads_cache) == ("", True)


def test_an_unset_max_tokens_is_clamped_and_a_set_one_refused(site: Site) -> None:
    prompt = [1] * (MAX_MODEL_LEN - 4)
    body = post(site, prompt=prompt).json()
    assert body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["finish_reason"] == "length"
    site_requests.check_refusal(post(site, prompt=prompt, max_tokens=5), "max_tokens", "context_length_exceeded")


def test_texts_that_could_fit_are_encoded(site: Site) -> None:
    refused = post(site, prompt="x" * 2500)
    assert "2500 tokens" in site_requests.check_refusal(refused, "prompt", "context_length_exceeded")
    fits = post(site, prompt="<eos>" * 511, max_tokens=1)
    assert fits.json()["usage"]["prompt_tokens"] == 511


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3]])
def test_the_end_of_a_stream_comes_with_its_last_token(site: Site, prompt: Any) -> None:
    site.loop.step_s = 0.02
    events = stream(site, prompt=prompt, max_tokens=5, return_token_ids=True)
    assert len(events) <= 5
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert all(event["choices"][0]["token_ids"] for event in events)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt": "hello"}, None),
        ({"prompt": "hello", "stop": "lo"}, "lo"),
        ({"prompt": "hello", "stop": ["zz", "llo", "lo", "ohe"]}, "llo"),
        ({"prompt": "hello", "stop": ["ohe", "lloh"]}, "lloh"),
        ({"prompt": [70, 71, 72], "stop_token_ids": [9, 72]}, 72),
        ({"prompt": [70, EOS, 72], "stop_token_ids": [72]}, None),
        ({"prompt": [70, EOS, 72], "stop_token_ids": [EOS]}, None),
        ({"prompt": [70, EOS, 72], "stop_token_ids": [EOS], "ignore_eos": True}, EOS),
    ],
)
def test_the_stop_reason_is_reported(site: Site, settings: dict[str, Any], reason: Any) -> None:
    assert post(site, **settings).json()["choices"][0]["stop_reason"] == reason
    events = stream(site, **settings)
    assert [event["choices"][0]["stop_reason"] for event in events][-1] == reason
    assert all(event["choices"][0]["stop_reason"] is None for event in events[:-1])


@pytest.mark.parametrize("settings", [{"max_tokens": 3}, {"max_tokens": 400, "stop": "oh"}])
def test_every_answer_counts_in_the_metrics(site: Site, settings: dict[str, Any]) -> None:
    def counts() -> list[float]:
        text = site.http.get("/metrics").text
        names = ("time_to_first_token", "e2e_request_latency", "request_queue_time")
        return [float(re.search(rf"^radixkv:{name}_seconds_count (\S+)$", text, re.MULTILINE)[1]) for name in names]

    before = counts()
    post(site, prompt="hello", **settings)
    assert counts() == [count + 1 for count in before]


def test_a_disconnect_during_an_upload_is_not_an_error(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
            connection.sendall(COMPLETIONS_HEAD + b"Content-Length: 100\r\n\r\n{")
            time.sleep(0.1)
    assert post(site, prompt="ab").status_code == 200
    assert caplog.records == []


def test_an_internal_error_closes_its_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fault() -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(site.client, "stats", fault)
    for _ in range(3):
        reply = site.http.get("/metrics")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert site.http.get("/version").status_code == 200


def test_the_error_of_one_of_several_prompts_names_it(site: Site) -> None:
    def message(*prompts: list[int]) -> str:
        text: str = post(site, prompt=list(prompts), max_tokens=20).json()["error"]["message"]
        return text

    assert message([1, 2], [FAILS_AFTER_THREE, 1]) == f"prompt[1]: {message([FAILS_AFTER_THREE, 1])}"


def test_a_failure_in_a_stream_is_an_event_and_then_done(site: Site) -> None:
    body = {"prompt": [FAILS_AFTER_THREE, 1, 2], "max_tokens": 20}
    site.loop.may_fail = False
    with site.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        events = reply.iter_lines()
        assert "choices" in next(events)
        site.loop.may_fail = True
        last = [line for line in events if line][-2:]
    assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "numerical_error"
    assert last[1] == "data: [DONE]"
    assert post(site, **body).status_code == 500


def test_one_failed_prompt_ends_the_whole_request(site: Site) -> None:
    reply = post(site, prompt=[[1, 2], [FAILS_AFTER_THREE, 1]], max_tokens=400)
    assert reply.status_code == 500
    wait_for(lambda: not site.loop.running, "the other prompt was not cancelled")


@pytest.mark.parametrize("streams", [True, False])
def test_a_disconnect_cancels_the_request(site: Site, streams: bool) -> None:
    site.loop.step_s = 0.02
    body = json.dumps({"prompt": ["ab", "cd"], "max_tokens": 400, "stream": streams}).encode()
    head = COMPLETIONS_HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", site.port), timeout=LIMIT_S) as connection:
        connection.sendall(head + body)
        wait_for(lambda: len(site.loop.running) == 2, "never submitted")
        if streams:
            assert connection.recv(100)
    wait_for(lambda: not site.loop.running, "still running")
    assert {submit.id for submit in site.loop.submitted[-2:]} <= {*site.loop.cancelled}


def test_a_disconnect_cancels_a_queued_request(site: Site) -> None:
    site.loop.is_held = True
    with pytest.raises(httpx.ReadTimeout):
        site.http.post("/v1/completions", json={"prompt": "ab"}, timeout=httpx.Timeout(LIMIT_S, read=0.3))
    wait_for(lambda: not site.loop.running, "still waiting")


def test_concurrent_requests_do_not_mix(site: Site) -> None:
    async def many() -> list[str]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{site.port}", timeout=LIMIT_S) as http:
            replies = await asyncio.gather(
                *(http.post("/v1/completions", json={"prompt": f"<{i}>", "max_tokens": 6}) for i in range(50))
            )
            return [reply.json()["choices"][0]["text"] for reply in replies]

    assert asyncio.run(many()) == [(f"<{i}>" * 3)[:6] for i in range(50)]


def test_draining_refuses_and_health_says_so(site: Site) -> None:
    assert site.http.get("/health").status_code == 200
    site.client.refusal = Draining("the server is shutting down")
    try:
        assert site.http.get("/health").status_code == 503
        assert site.http.get("/health").json() == {"status": "draining"}
        reply = post(site, prompt="ab")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "draining"
        assert site.http.get("/metrics").status_code == 200
    finally:
        site.client.refusal = None
    assert post(site, prompt="ab").status_code == 200


def test_models(site: Site) -> None:
    listed = site.http.get("/v1/models").json()
    (model,) = listed.pop("data")
    assert listed == {"object": "list"}
    assert model.pop("max_model_len") == MAX_MODEL_LEN
    about = {"id": "echo", "object": "model", "created": 1_700_000_000, "owned_by": "radixkv", "root": "some/echo"}
    assert model == about


def test_a_model_may_have_several_names(served_model: ServedModel, tmp_path: Path) -> None:
    requests = [*asks("a").items()][:4]
    with running_site(replace(served_model, other_names=("claude", "org/gpt")), tmp_path) as named:
        listed = named.http.get("/v1/models").json()["data"]
        assert [(model["id"], model["root"]) for model in listed] == [
            ("echo", "some/echo"),
            ("claude", "some/echo"),
            ("org/gpt", "some/echo"),
        ]
        assert named.http.get("/v1/models/org/gpt").json()["id"] == "org/gpt"
        for name in ("echo", "claude", "org/gpt", None):
            for path, body in requests:
                assert site_requests.post(named, path, **body, model=name)["model"] == "echo"
        for name in ("other", "gpt"):
            assert named.http.get(f"/v1/models/{name}").status_code == 404
            for path, body in requests:
                assert named.http.post(path, json={"model": name, **body}).status_code == 404
        assert named.http.get("/server_info").json()["served_model_name"] == "echo"
