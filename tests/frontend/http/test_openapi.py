"""``/openapi.json`` and ``/docs`` against the routes, the bodies and what the server accepts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from radixkv.frontend.api.lifetimes import CloseSessionRequest, InvalidateRequest, PinRequest
from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest
from radixkv.frontend.api.sglang.schema import GenerateRequest, SamplingFields
from radixkv.frontend.api.tokenize import DetokenizeRequest, TokenizeRequest
from radixkv.frontend.app import ROUTES_OF_TASKS
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.text_request import CachePromptRequest, CachePromptsRequest
from radixkv.settings.compat import Place, refusals
from support.running_site import make_app
from support.scripted_runtime import Site

BODIES: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/generate", GenerateRequest, {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
    ("/tokenize", TokenizeRequest, {"prompt": "a"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [1]}),
    ("/cache/explain", CachePromptRequest, {"prompt": "a"}),
    ("/cache/match", CachePromptsRequest, {"prompt": ["a", "b"]}),
    ("/cache/pin", PinRequest, {"prompt": "a"}),
    ("/cache/invalidate", InvalidateRequest, {"prompt": "a" * 16}),
    ("/sessions/{id}/close", CloseSessionRequest, {}),
]

VALUES: list[Any] = ["x", ["x"], [3], {"x": 1}, True, False, 3, [[1]]]
"""Each field of a feature requests something with at least one of these values."""


@pytest.fixture(scope="module")
def document(site: Site) -> dict[str, Any]:
    document: dict[str, Any] = site.http.get("/openapi.json").json()
    return document


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from [item] if key == "$ref" else references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_route_is_in_the_document(site: Site, served_model: ServedModel, document: dict[str, Any]) -> None:
    app = make_app(site.client, served_model)
    assert isinstance(app, FastAPI)
    of_other_tasks = {path for task, paths in ROUTES_OF_TASKS.items() if task != "generate" for path in paths}
    routes = {
        route.path_format: {method.lower() for method in route.methods}
        for route in app.routes
        if isinstance(route, APIRoute) and route.path not in {*refusals(Place.ROUTE), *of_other_tasks, "/docs"}
    }
    assert {path: set(operations) for path, operations in document["paths"].items()} == routes
    assert len(routes) >= 20


def test_the_document_is_complete_in_itself(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) == schemas
    operations = [
        (path, operation) for path, methods in document["paths"].items() for operation in methods.values()
    ]
    assert len({operation["operationId"] for _, operation in operations}) == len(operations)
    for path, operation in operations:
        assert operation["description"]
        assert "422" not in operation["responses"]
        parameters = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"]
        assert parameters == re.findall(r"\{(\w+)\}", path)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("post", "/v1/completions", {"prompt": -1}, 400),
        ("post", "/v1/completions", {"prompt": "a", "model": "other"}, 404),
        ("post", "/v1/messages", {"messages": []}, 400),
        ("post", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}], "model": "b"}, 404),
        ("put", "/generate", {"text": "a", "sampling_params": {"n": 0}}, 400),
        ("post", "/cache/match", {}, 400),
        ("get", "/v1/models/{name}", None, 404),
        ("post", "/sessions/{id}/close", {}, 404),
    ],
)
def test_an_error_has_a_status_and_the_fields_of_the_document(
    site: Site, document: dict[str, Any], method: str, path: str, body: Any, status: int
) -> None:
    reply = site.http.request(method, path.replace("{name}", "other").replace("{id}", "other"), json=body)
    assert reply.status_code == status
    schema = document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    jsonschema.validate(reply.json(), schema | {"components": document["components"]})


def test_responses_have_the_media_types_of_the_document(site: Site, document: dict[str, Any]) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    for stream in (False, True):
        media_type = site.http.post("/v1/completions", json=body | {"stream": stream}).headers["content-type"]
        content = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
        assert media_type.partition(";")[0] in content
    health = document["paths"]["/health"]
    assert "content" not in health["get"]["responses"]["200"]
    assert "content" in health["get"]["responses"]["503"]
    assert "content" not in health["head"]["responses"]["503"]


def is_refused(site: Site, path: str, field: str, requests: list[dict[str, Any]]) -> bool:
    """Returns whether the server refuses one of these requests because of a feature of this field."""
    for body in requests:
        reply = site.http.post(path, json=body)
        error = reply.json()["error"] if reply.status_code == 400 else {"code": None, "param": None}
        if (error["code"], error["param"]) == ("unsupported_feature", field):
            return True
    return False


@pytest.mark.parametrize(("path", "body", "example"), BODIES)
def test_the_fields_of_a_body_are_those_that_the_server_takes(
    site: Site, document: dict[str, Any], path: str, body: type[msgspec.Struct], example: dict[str, Any]
) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    taken = {
        name
        for name in body.__struct_fields__
        # taken if it equals n, without some options, and if it names the model alone
        if name in ("best_of", "structured_outputs", "model")
        or not is_refused(site, path, name, [{**example, name: value} for value in VALUES])
    }
    assert set(schema["properties"]) == taken
    required = {field.name for field in msgspec.structs.fields(body) if field.required}
    assert set(schema["required"]) == required


def test_sampling_params_show_the_fields_that_the_server_takes(site: Site, document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert "#/components/schemas/SamplingFields" in references(schemas["GenerateRequest"])
    taken = {
        name
        for name in SamplingFields.__struct_fields__
        if not is_refused(
            site,
            "/generate",
            name,
            [{"text": "a", "sampling_params": {"max_new_tokens": 1, name: value}} for value in VALUES],
        )
    }
    assert set(schemas["SamplingFields"]["properties"]) == taken


def test_the_page_shows_all_paths_and_fields_and_loads_nothing(site: Site, document: dict[str, Any]) -> None:
    reply = site.http.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    shown = set(re.findall(r"<code>(.*?)</code>", html.unescape(reply.text)))
    fields = {name for schema in document["components"]["schemas"].values() for name in schema["properties"]}
    assert shown == {*document["paths"], *fields}
    assert "<script" not in reply.text
    assert set(re.findall(r"""(?:src|href)="([^#]*?)["]""", reply.text)) == {"openapi.json"}
    assert "//" not in reply.text
    anchors = set(re.findall(r'href="#(.*?)"', reply.text))
    assert anchors <= set(re.findall(r'id="(.*?)"', reply.text))
