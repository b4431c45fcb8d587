"""Which routes a tenant's key opens, and that the runtime is told whose request each is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from radixkv.frontend.http.auth import OPEN_PATHS, OPERATOR_PATHS
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.compat import Place, refusals
from radixkv.settings.config import Task
from radixkv.settings.server_config import ServerConfig
from radixkv.settings.tenants import Tenants
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_messages import CloseSession, Explain, Invalidate, Match, Pin
from radixkv.wire.messages import Pooling, Submit
from radixkv.wire.namespace import CacheNamespace
from support.running_site import make_app, running_site, site_fixture
from support.scripted_runtime import Site
from support.site_requests import asks

KEYS = ServerConfig(api_key="operator", tenants=Tenants(names={"key-a": "a", "key-b": "b"}))
MESSAGES = [{"role": "user", "content": "ab"}]
TENANT_PATHS = {
    "/cache/explain",
    "/cache/invalidate",
    "/cache/match",
    "/cache/pin",
    "/detokenize",
    "/docs",
    "/generate",
    "/get_model_info",
    "/model_info",
    "/openapi.json",
    "/rerank",
    "/score",
    "/sessions/{id:path}/close",
    "/tokenize",
    "/v1/chat/completions",
    "/tokenizer_info",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{name:path}",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v2/rerank",
    "/version",
}
"""What a tenant's key opens: none of these shows or changes what is another tenant's."""


shared = site_fixture(KEYS)


@pytest.fixture
def received(shared: Site, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the runtime receives."""
    found: list[Any] = []
    receive = shared.loop.receive
    monkeypatch.setattr(shared.loop, "receive", lambda message: (found.append(message), receive(message))[1])
    return found


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_each_route_is_a_tenants_the_operators_or_open(shared: Site, served_model: ServedModel) -> None:
    app = make_app(shared.client, served_model, KEYS)
    assert isinstance(app, FastAPI)
    paths = {route.path for route in app.routes if isinstance(route, Route)} - refusals(Place.ROUTE).keys()
    assert paths == TENANT_PATHS | OPERATOR_PATHS | OPEN_PATHS
    assert len(paths) == len(TENANT_PATHS) + len(OPERATOR_PATHS) + len(OPEN_PATHS)


@pytest.mark.parametrize("path", sorted(OPERATOR_PATHS))
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "DELETE"])
def test_an_operators_route_is_closed_to_tenants(shared: Site, path: str, method: str) -> None:
    reply = shared.http.request(method, path, headers=key("key-a"))
    assert reply.status_code == 403
    if method != "HEAD":
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("PermissionDeniedError", "forbidden")
    assert shared.http.request(method, path, headers=key("wrong")).status_code == 401


def test_without_an_operator_nobody_opens_its_routes(
    served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_site(
        served_model, tmp_path_factory.mktemp("s"), ServerConfig(tenants=Tenants(names={"key-a": "a"}))
    ) as site:
        assert site.http.get("/metrics").status_code == 401
        assert site.http.get("/metrics", headers=key("key-a")).status_code == 403
        assert site.http.get("/version", headers=key("key-a")).status_code == 200
        assert site.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 2}, Submit),
        ("/v1/completions", {"prompt": "ab", "max_tokens": 2, "stream": True}, Submit),
        *[(path, body, Submit) for path, body in asks("ab").items()],
        ("/cache/explain", {"prompt": "ab"}, Explain),
        ("/cache/match", {"prompt": "ab"}, Match),
        ("/cache/pin", {"prompt": "ab"}, Pin),
        ("/cache/invalidate", {"cache_salt": "s"}, Invalidate),
        ("/sessions/s/close", {}, CloseSession),
    ],
)
def test_the_runtime_is_told_whose_request_it_is(
    shared: Site, received: list[Any], path: str, body: dict[str, Any], kind: type
) -> None:
    for name, tenant in (("key-a", "a"), ("key-b", "b"), ("operator", "")):
        received.clear()
        reply = shared.http.post(path, json=body, headers=key(name))
        assert reply.status_code in (200, 404), reply.text  # there is no such session
        messages = [message for message in received if isinstance(message, kind)]
        assert messages
        assert {message.namespace.tenant for message in messages} == {tenant}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *asks("ab").items(),
        ("/v1/messages/count_tokens", {"messages": MESSAGES, "model": "echo"}),
        ("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 1}}),
        ("/tokenize", {"prompt": "ab"}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/cache/explain", {"prompt": "ab"}),
        ("/cache/match", {"messages": MESSAGES}),
    ],
)
@pytest.mark.parametrize("text", ["ab", "a longer text " * 80], ids=["inline", "in a thread"])
def test_texts_are_tokenized_apart(
    shared: Site, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], text: str
) -> None:
    """So that nobody can tell by the time whether another tenant has sent a text."""
    namespaces: list[str] = []

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def encode(*args: Any, namespace: str, **options: Any) -> Any:
            namespaces.append(namespace)
            return original(*args, namespace=namespace, **options)

        return encode

    for name in ("encode_inline", "encode_batch"):
        monkeypatch.setattr(Tokenizer, name, recorded(getattr(Tokenizer, name)))
    body = json.loads(json.dumps(body).replace("ab", text))
    for name, tenant in (("key-a", "a"), ("operator", "")):
        namespaces.clear()
        shared.http.post(path, json=body, headers=key(name))
        assert set(namespaces) == {tenant}


@pytest.mark.parametrize(
    ("task", "pooling", "path", "body"),
    [
        ("embed", Pooling(), "/v1/embeddings", {"input": ["ab", "cd"]}),
        ("score", Pooling((5, 6)), "/v1/rerank", {"query": "ab", "documents": ["cd", "ef"]}),
        ("score", Pooling((5, 6)), "/v1/score", {"text_1": "ab", "text_2": ["cd", "ef"]}),
    ],
)
def test_the_runtime_is_told_whose_text_is_pooled(
    served_model: ServedModel, tmp_path: Path, task: Task, pooling: Pooling, path: str, body: dict[str, Any]
) -> None:
    model = replace(served_model, task=task, pooling=pooling, hidden_size=4)
    with running_site(model, tmp_path, KEYS) as site:
        for name, tenant in (("key-a", "a"), ("operator", "")):
            site.loop.submitted.clear()
            reply = site.http.post(path, json=body | {"cache_salt": "s"}, headers=key(name))
            assert reply.status_code == 200, reply.text
            assert [message.namespace for message in site.loop.submitted] == [CacheNamespace(tenant, "s")] * 2


def test_a_prompt_of_another_tenant_is_never_sent(
    shared: Site, received: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_the_tenant(model: ServedModel, tenant: str, cache_salt: str | None) -> CacheNamespace:
        return CacheNamespace("", cache_salt or "", model.adapter)

    monkeypatch.setattr(ServedModel, "namespace", forgets_the_tenant)
    for path, body in asks("ab").items():
        assert shared.http.post(path, json=body, headers=key("key-a")).status_code == 500
    assert not any(isinstance(message, Submit) for message in received)


def test_the_servers_own_checks_have_no_tenant(shared: Site) -> None:
    assert shared.http.get("/health_generate", headers=key("operator")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES, "model": "echo"}),
        ("/v1/responses", {"input": "ab"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "ab"}),
    ],
)
def test_explanations_are_of_the_tenant_and_the_salt_of_the_body(
    shared: Site, received: list[Any], path: str, body: dict[str, Any]
) -> None:
    for name, tenant in (("key-a", "a"), ("operator", "")):
        received.clear()
        body = {**body, "cache_salt": "s"}
        reply = shared.http.post(f"/cache/explain?path={path}", json=body, headers=key(name))
        assert reply.status_code == 200, reply.text
        asked = [message.namespace for message in received if isinstance(message, Explain)]
        assert asked == [CacheNamespace(tenant, "s")]


def test_a_body_cannot_name_a_tenant(shared: Site, received: list[Any]) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "tenant": "b"}
    assert shared.http.post("/v1/completions", json=body, headers=key("key-a")).status_code == 200
    assert [message.namespace.tenant for message in received if isinstance(message, Submit)] == ["a"]
