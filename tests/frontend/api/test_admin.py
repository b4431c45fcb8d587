"""Routes that operate the engine and that describe it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from radixkv import __version__
from radixkv.errors import Draining, QueueTimeout
from radixkv.frontend.http.error_response import error_response
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.checks import MIN_PRIORITY
from radixkv.settings.server_config import ServerConfig
from radixkv.wire.cache_messages import Flush, Flushed
from support.running_site import running_site, site_fixture
from support.scripted_runtime import EOS, FAILS_AT_ONCE, MAX_MODEL_LEN, VOCAB_SIZE, ScriptedLoop, Site
from support.site_requests import asks, check_refusal

vllm = site_fixture(
    ServerConfig(metrics_compat="vllm", served_model_name="echo"), default_sampling={"temperature": 0.5}
)


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_liveness_is_empty_and_ends_with_the_runtime(site: Site, path: str) -> None:
    for method in ("GET", "HEAD"):
        reply = site.http.request(method, path)
        assert (reply.status_code, reply.content) == (200, b"")
    site.client.refusal = Draining("ends")
    try:
        assert site.http.get(path).status_code == 503
    finally:
        site.client.refusal = None


def test_health_generate_generates_a_token(site: Site) -> None:
    before = len(site.loop.submitted)
    reply = site.http.get("/health_generate")
    assert (reply.status_code, reply.content) == (200, b"")
    (submit,) = site.loop.submitted[before:]
    assert (submit.sampling.max_tokens, submit.priority) == (1, MIN_PRIORITY)


def test_health_generate_fails_without_a_token(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.frontend.api.admin.HEALTH_GENERATE_TIMEOUT_S", 0.1)
    site.loop.is_held = True
    try:
        assert site.http.get("/health_generate").status_code == 503
    finally:
        site.loop.is_held = False
    site.client.refusal = Draining("ends")
    try:
        assert site.http.get("/health_generate").status_code == 503
    finally:
        site.client.refusal = None


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache")]
)
def test_a_reset_reports_freed_and_leased_pages(site: Site, method: str, path: str) -> None:
    reply = site.http.request(method, path).json()
    assert (reply["pages_freed"], reply["pages_held"]) == (3, 2)
    assert "2 pages" in reply["message"]


def test_a_reset_without_leases_does_not_mention_them(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = ScriptedLoop.receive

    def flushed(self: ScriptedLoop, message: object) -> object:
        return [Flushed(message.id, 5, 0)] if isinstance(message, Flush) else receive(self, message)

    monkeypatch.setattr(ScriptedLoop, "receive", flushed)
    reply = site.http.post("/reset_prefix_cache").json()
    assert (reply["pages_freed"], reply["pages_held"]) == (5, 0)
    assert "pages" not in reply["message"]


def test_unsupported_reset_options_are_refused_by_name(site: Site) -> None:
    assert site.http.get("/reset_prefix_cache").status_code == 405
    assert site.http.head("/flush_cache").status_code == 405
    assert site.http.post("/reset_prefix_cache?reset_connector=false").status_code == 200
    for name in ("reset_connector", "reset_running_requests"):
        error = site.http.post(f"/reset_prefix_cache?{name}=true").json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_feature", name)


def test_the_version_is_that_of_the_package(site: Site) -> None:
    assert site.http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_the_servers_settings_and_state(vllm: Site, path: str) -> None:
    info = vllm.http.get(path).json()
    (state,) = info["internal_states"]
    assert (state["n_waiting"], state["prefix_hits_total"], state["last_gen_throughput"]) == (7, 40, 0)
    assert "id" not in state
    expected = {
        "model_path": "tiny",
        "served_model_name": "echo",
        "version": __version__,
        "max_total_num_tokens": 64 * 16,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "page_size": 16,
        "device": "NVIDIA H200",
        "dtype": "bfloat16",
        "schedule_policy": "lpm",
        "metrics_compat": "vllm",
        "needs_api_key": False,
        "seed": 0,
    }
    assert {name: info[name] for name in expected} == expected
    assert "api_key" not in info


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model(vllm: Site, path: str) -> None:
    assert vllm.http.get(path).json() == {
        "model_path": "some/echo",
        "tokenizer_path": "some/echo",
        "is_generation": True,
        "preferred_sampling_params": {"temperature": 0.5},
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [EOS],
        "has_tokenizer": True,
        "has_chat_template": True,
    }


def test_loads_have_the_fields_that_routers_read(site: Site) -> None:
    reply = site.http.get("/v1/loads?include=core").json()
    assert (reply["version"], reply["dp_rank_count"]) == (__version__, 1)
    (load,) = reply["loads"]
    assert load == {
        "dp_rank": 0,
        "num_running_reqs": 0,
        "num_waiting_reqs": 7,
        "num_used_tokens": 16 * 16,
        "max_total_num_tokens": 64 * 16,
        "token_usage": 0.25,
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "max_running_requests": 256,
    }
    assert reply["aggregate"]["total_reqs"] == 7
    for query in ("dp_rank=1", "format=prometheus"):
        error = site.http.get(f"/v1/loads?{query}").json()["error"]
        assert error["param"] == query.split("=")[0]


def test_metrics_are_repeated_with_metrics_compat(site: Site, vllm: Site) -> None:
    assert 'vllm:num_requests_waiting{engine="0",model_name="echo"} 7.0' in vllm.http.get("/metrics").text
    assert "vllm:" not in site.http.get("/metrics").text


def test_a_full_queue_and_a_queue_timeout_set_retry_after(site: Site) -> None:
    full = site.http.post("/v1/completions", json={"prompt": [FAILS_AT_ONCE]})
    waited = error_response(QueueTimeout("it waited for 5 s"), "/generate")
    for status, headers, body, code in (
        (full.status_code, full.headers, full.content, "queue_full"),
        (waited.status_code, waited.headers, waited.body, "queue_timeout"),
    ):
        assert status == 503
        assert int(headers["Retry-After"]) >= 1
        assert msgspec.json.decode(body)["error"]["code"] == code


@pytest.mark.parametrize(
    "path",
    [
        "/encode",
        "/abort_request",
        "/sleep",
        "/pause",
        "/start_profile",
        "/invocations",
        "/classify",
        "/v1/moderations",
        "/v1/audio/speech",
    ],
)
def test_unsupported_routes_are_refused_by_name(site: Site, path: str) -> None:
    message = check_refusal(site.http.post(path, json={}), None, "unsupported_feature")
    assert message.startswith(f"{path} ")
    assert path == "/abort_request" or "/v1/completions" in message, "which are supported"


@pytest.mark.parametrize(
    ("path", "task"),
    [("/v1/embeddings", "embed"), ("/v1/rerank", "score"), ("/v2/rerank", "score"), ("/v1/score", "score")],
)
def test_routes_of_other_tasks_are_refused_with_the_task_that_has_them(site: Site, path: str, task: str) -> None:
    message = check_refusal(site.http.post(path, json={}), None, "unsupported_feature")
    assert message.startswith(f"{path} ")
    assert f"--task {task}" in message


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_priority_outside_the_range_is_refused_but_not_the_health_checks(
    served_model: ServedModel, tmp_path: Path, path: str
) -> None:
    with running_site(replace(served_model, priority_range=(-1, 2)), tmp_path) as site:
        body = asks("ab")[path]
        replies = [site.http.post(path, json=body | {"priority": priority}) for priority in (-2, -1, 0, 2, 3)]
        assert [reply.status_code for reply in replies] == [400, 200, 200, 200, 400]
        refusal = replies[-1].json()["error"]
        assert refusal["param"] == "priority"
        assert all(part in refusal["message"] for part in ("3", "-1 to 2", "--priority-range"))
        assert site.http.get("/health_generate").status_code == 200
        assert site.loop.submitted[-1].priority == MIN_PRIORITY
