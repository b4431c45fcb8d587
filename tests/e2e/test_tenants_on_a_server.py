"""One real server with an operator and tenants, each with keys of its own."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.failed_start import failed_start_error
from support.live import LIMIT_S, LiveServer, serving

OPERATOR = "operator-key"
TENANTS = """
[[tenants]]
name = "search"
keys = ["search-1", "search-2"]
priority_range = [0, 5]
min_page_share = 0.2
min_row_share = 0.5

[[tenants]]
name = "batch"
keys = ["batch-1"]
max_page_share = 0.6

[[tenants]]
name = "open-a"
keys = ["open-a-1"]
cache_salt = "shared"

[[tenants]]
name = "open-b"
keys = ["open-b-1"]
cache_salt = "shared"
"""
MESSAGES = [{"role": "user", "content": "What does the tenant search see? " * 8}]
ADAPTER = {"lora_name": "a", "lora_path": "a"}
SEEN_BODIES: dict[str, dict[str, Any] | None] = {
    "/cache/explain": {"messages": MESSAGES},
    "/cache/invalidate": {"cache_salt": "a salt with one prompt"},
    "/cache/match": {"messages": MESSAGES},
    "/cache/pin": {"messages": MESSAGES, "ttl": "0s"},
    "/detokenize": {"tokens": [5, 6]},
    "/generate": {
        "text": "a b",
        "sampling_params": {"max_new_tokens": 3, "temperature": 0},
        "return_logprob": True,
    },
    "/load_lora_adapter": ADAPTER,
    "/sessions/{id}/close": {},
    "/tokenize": {"prompt": "a b"},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "explain_cache": True},
    "/v1/completions": {"prompt": ["a", "b" * 99], "max_tokens": 3, "temperature": 0, "logprobs": 2},
    "/unload_lora_adapter": ADAPTER,
    "/v1/load_lora_adapter": ADAPTER,
    "/v1/unload_lora_adapter": ADAPTER,
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 3, "temperature": 0},
    "/v1/messages/count_tokens": {"model": "m", "messages": MESSAGES},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 16, "temperature": 0},
}
"""Bodies of all routes that take one and change nothing for a tenant's key."""
CHANGING = re.compile(r"id|created|\w*(_at|latency|_time|_s|_ts)|date|content-length|(x-)?request-id")
"""Names of fields and headers that are new or a time in every reply."""
PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 4


@pytest.fixture(scope="module")
def server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("s")
    (folder / "tenants.toml").write_text(TENANTS)
    flags = (
        "--tenants",
        str(folder / "tenants.toml"),
        "--max-num-seqs",
        "2",
        "--max-queued-requests",
        "16",
        "--max-model-len",
        "2048",
    )
    with serving(sensitive, folder / "errors", *flags, key=OPERATOR) as live:
        yield live


def send(server: LiveServer, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(server.base_url + path, json=body, headers=headers, timeout=LIMIT_S)


def cached_tokens(server: LiveServer, key: str, **body: Any) -> int:
    reply = send(server, key, **{"prompt": PROMPT, "max_tokens": 1, "temperature": 0} | body)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_finds_its_own_prompts_and_nobody_elses(server: LiveServer) -> None:
    assert cached_tokens(server, "search-1") == 0
    found = cached_tokens(server, "search-2")
    assert found > 64, "both keys are one tenant's"
    assert cached_tokens(server, "batch-1") == 0
    assert cached_tokens(server, OPERATOR) == 0
    assert cached_tokens(server, "search-1", cache_salt="a user") == 0, "its own salts divide it further"
    assert cached_tokens(server, "batch-1") == found
    for key in ("search-1", "batch-1"):
        reply = send(server, key, "/cache/explain", prompt=PROMPT)
        assert reply.json()["cached_tokens"] >= found


def test_nothing_tells_a_prompt_of_another_tenant_from_one_that_nobody_has_sent(server: LiveServer) -> None:
    sent, unsent = ("The secret of the tenant search is " + word * 60 for word in ("green ", "brown "))
    for _ in range(2):
        cached_tokens(server, "search-1", prompt=sent)

    def answers(prompt: str) -> list[Any]:
        explained = send(server, "batch-1", "/cache/explain", prompt=prompt).json()
        matched = send(server, "batch-1", "/cache/match", prompt=prompt).json()["prompts"]
        pinned = send(server, "batch-1", "/cache/pin", prompt=prompt).json()["pinned_tokens"]
        return [explained, matched, pinned, cached_tokens(server, "batch-1", prompt=prompt, explain_cache=True)]

    assert answers(sent) == answers(unsent)


def seen(server: LiveServer, key: str) -> dict[str, Any]:
    """Returns all that a key gets from all routes, apart from what is new or a time in every reply."""
    routes: dict[str, dict[str, Any]] = server.http.get("/openapi.json").json()["paths"]
    replies = {}
    send(server, key, prompt="A prompt to drop. " * 9, max_tokens=1, cache_salt="a salt with one prompt")
    send(server, key, prompt="A session to close. " * 9, max_tokens=1, session_id="s")
    for path, methods in sorted(routes.items()):
        for method in methods:
            url = server.base_url + path.replace("{id}", "s").replace("{name}", "tiny")
            body = SEEN_BODIES.get(path)
            assert body is not None or "requestBody" not in methods[method], f"{path} needs a body here"
            headers = {"Authorization": f"Bearer {key}"}
            reply = httpx.request(method, url, json=body, headers=headers, timeout=LIMIT_S)
            is_json = reply.headers.get("content-type") == "application/json"
            content = lasting(reply.json()) if is_json else reply.text
            replies[method, path] = (reply.status_code, lasting(dict(reply.headers)), content)
    return replies


def lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: lasting(one) for name, one in value.items() if not CHANGING.fullmatch(name)}
    return [lasting(one) for one in value] if isinstance(value, list) else value


@contextmanager
def traffic(server: LiveServer, key: str) -> Iterator[None]:
    """Keeps more of a tenant's requests running and waiting than the server has rows."""
    begun = threading.Event()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": [number, *range(200)], "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                begun.set()

    async def ask_all() -> None:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=server.base_url, timeout=LIMIT_S, headers=headers) as client:
            asking = [asyncio.create_task(ask(client, number)) for number in range(12)]
            while not done.is_set():
                await asyncio.sleep(0.01)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    done = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(ask_all(),))
    thread.start()
    try:
        assert begun.wait(LIMIT_S)
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.nightly
def test_a_tenant_sees_the_same_with_and_without_the_traffic_of_another(server: LiveServer) -> None:
    seen(server, "search-1")  # from now on its own prompts are cached
    alone = seen(server, "search-1")
    with traffic(server, "batch-1"):
        beside = seen(server, "search-1")
        assert server.metric("num_requests_running") > 0
        assert server.metric("num_requests_waiting") > 0
    after = seen(server, "search-1")
    assert alone["post", "/cache/match"][0] == 200
    assert beside == alone
    assert after == alone


def test_tenants_with_a_shared_cache_find_each_others_prompts(server: LiveServer) -> None:
    prompt = "A system prompt that the teams of one company have in common, of several pages of tokens. " * 4
    assert cached_tokens(server, "open-a-1", prompt=prompt) == 0
    assert cached_tokens(server, "open-b-1", prompt=prompt) > 64
    reply = send(server, "open-a-1", prompt=prompt, cache_salt="mine")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")
    reply = send(server, "open-a-1", "/cache/invalidate", prompt=prompt)
    assert reply.status_code == 400
    assert "only the operator's key" in reply.json()["error"]["message"]
    assert send(server, OPERATOR, "/cache/invalidate", prompt=prompt).status_code == 200
    assert cached_tokens(server, "open-b-1", prompt=prompt) == 0


def test_a_tenant_invalidates_only_what_is_its_own(server: LiveServer) -> None:
    prompt = "A prompt that both tenants send, each for itself, and that one of them takes back. " * 4
    for key in ("search-1", "batch-1"):
        cached_tokens(server, key, prompt=prompt)
    assert send(server, "batch-1", "/cache/invalidate", cache_salt="").json()["pages_dropped"]["device"] > 0
    assert cached_tokens(server, "batch-1", prompt=prompt) == 0
    assert cached_tokens(server, "search-1", prompt=prompt) > 64


def test_only_known_keys_are_let_in(server: LiveServer) -> None:
    for key in ("search-3", "search", "Search-1", "search-1x", "batch"):
        reply = send(server, key, prompt="x")
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(server.base_url + "/v1/models", headers={"x-api-key": "search-1"}).status_code == 200


def test_the_operators_routes_are_for_its_key_only(server: LiveServer) -> None:
    for path in (
        "/metrics",
        "/flush_cache",
        "/server_info",
        "/v1/loads",
        "/cache/doctor",
        "/cache/tree",
        "/cache/tables",
    ):
        headers = {"Authorization": "Bearer search-1"}
        reply = httpx.get(server.base_url + path, headers=headers, timeout=LIMIT_S)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden"), path
        assert server.http.get(path).status_code == 200
    info = server.http.get("/server_info").text
    assert "search" in info
    assert not any(key in info for key in ("search-1", "batch-1", OPERATOR))


def test_metrics_have_the_tenants_of_the_file(server: LiveServer) -> None:
    for key in ("search-1", OPERATOR):
        cached_tokens(server, key, prompt="A prompt for the metrics, as long as a page of tokens.")
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith("radixkv:tenant_")]
    values = {tuple(line.rsplit(" ", 1)[0].split("{")): float(line.rsplit(" ", 1)[1]) for line in lines}
    assert {labels for _, labels in values} == {
        f'tenant="{name}"}}' for name in ("search", "batch", "open-a", "open-b")
    }
    assert values["radixkv:tenant_computed_tokens_total", 'tenant="search"}'] > 10
    assert {labels for name, labels in values if name == "radixkv:tenant_kv_pages"} == {
        'tenant="search"}',
        'tenant="batch"}',
    }


def test_a_priority_beyond_the_tenants_range_is_refused(server: LiveServer) -> None:
    assert send(server, "search-1", prompt="x", max_tokens=1, priority=5).status_code == 200
    for priority in (-1, 6):
        reply = send(server, "search-1", prompt="x", max_tokens=1, priority=priority)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")
        assert "'search' may use 0 to 5" in reply.json()["error"]["message"]
    assert send(server, "batch-1", prompt="x", max_tokens=1, priority=-5).status_code == 200


def test_a_flood_of_one_tenant_delays_and_refuses_only_its_own_requests(server: LiveServer) -> None:
    answered: list[tuple[str, int]] = []

    async def ask(client: httpx.AsyncClient, key: str, number: int) -> None:
        body = {"prompt": [number, *range(40)], "max_tokens": 4, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key}"}
        reply = await client.post("/v1/completions", json=body, headers=headers)
        answered.append((key, reply.status_code))

    async def flood() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=LIMIT_S, limits=limits) as client:
            flooding = [asyncio.create_task(ask(client, "batch-1", number)) for number in range(30)]
            while ("batch-1", 200) not in answered:
                await asyncio.sleep(0.001)
            await asyncio.gather(*[ask(client, "search-1", number) for number in range(3)], *flooding)

    asyncio.run(flood())
    flood_replies = Counter(status for key, status in answered if key == "batch-1")
    assert flood_replies.keys() == {200, 503}
    assert 16 <= flood_replies[200] < 30
    single = [index for index, (key, _) in enumerate(answered) if key == "search-1"]
    assert all(answered[index][1] == 200 for index in single)
    n_before = Counter(answered[: single[-1]])["batch-1", 200]
    assert n_before < 12, "two rows: each of three requests waits for about two of the flood's"
    assert server.is_idle()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ("min_row_share = 1", "the min_row_share of others leave tenant 'b' none of the "),
        ("min_page_share = 0.95", "tenant 'b' may have "),
    ],
)
def test_shares_that_cannot_be_kept_end_the_start(
    sensitive: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, shares: str, message: str
) -> None:
    """How many rows and pages there are is known only on the device."""
    file = tmp_path / "tenants.toml"
    file.write_text(f'[[tenants]]\nname = "a"\nkeys = ["1"]\n{shares}\n[[tenants]]\nname = "b"\nkeys = ["2"]\n')
    flags = ("--tenants", str(file), "--max-total-tokens", "8192")
    assert message in failed_start_error(tmp_path_factory.mktemp("t"), str(sensitive), *flags)
