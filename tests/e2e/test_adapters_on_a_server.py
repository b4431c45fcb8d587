"""A server's adapters are models: listed, chosen by name, and apart in the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import resolve
from support.device_support import load_oracle
from support.live import LiveServer, serving, wait_for
from support.lora import linear_modules, save_adapter

SETTINGS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n" * 4
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("adapters")
    oracle = load_oracle(resolve(str(sensitive)))
    modules = linear_modules(oracle)
    paths = [save_adapter(folder / name, oracle, modules, seed=seed) for seed, name in enumerate(("sql", "law"))]
    flags = ("--enable-lora", "--lora-modules", f"sql={paths[0]}", f"law={paths[1]}", f"same={paths[0]}")
    log = folder / "requests"
    with serving(sensitive, folder / "errors", *flags, "--request-log", str(log)) as live:
        live.request_log = log
        yield live
        wait_for(live.is_idle, "pages or requests are left")


def answer(server: LiveServer, **body: Any) -> tuple[list[int], int]:
    reply = server.complete(prompt=PROMPT, **SETTINGS, **body)
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_models_lists_adapters_with_their_parent(server: LiveServer) -> None:
    base, *adapters = server.http.get("/v1/models").json()["data"]
    assert "parent" not in base
    assert [one["id"] for one in adapters] == ["sql", "law", "same"]
    assert {one["parent"] for one in adapters} == {base["id"]}
    assert adapters[0]["root"].endswith("/sql")
    assert server.http.get("/v1/models/law").json() == adapters[1]


def test_the_model_of_a_request_is_its_adapter(server: LiveServer) -> None:
    server.flush_cache()
    base = server.http.get("/v1/models").json()["data"][0]["id"]
    cold = {name: answer(server, model=name) for name in (base, "sql", "law")}
    assert [n_cached for _, n_cached in cold.values()] == [0, 0, 0]
    assert len({str(tokens) for tokens, _ in cold.values()}) == 3
    for name, (tokens, _) in cold.items():
        again, n_cached = answer(server, model=name)
        assert again == tokens
        assert n_cached > 32
    assert answer(server, model="same") == answer(server, model="sql"), "the same bytes"
    assert answer(server) == answer(server, model=base)
    reply = server.complete(prompt=PROMPT, model="sql", **SETTINGS)
    assert reply["model"] == "sql"


def test_each_api_takes_an_adapter(server: LiveServer) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 4, "temperature": 0}),
    ):
        server.flush_cache()
        reply = server.http.post(path, json={**body, "model": "law"})
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == "law"
        text = {"input": "prompt"}.get(next(iter(body)), "messages")
        explained = [
            server.http.post(
                f"/cache/explain?path={path}",
                json={**body, "model": model},
            ).json()
            for model in ("law", "sql")
        ]
        assert explained[0]["cached_tokens"] > 32, text
        assert (explained[1]["cached_tokens"], explained[1]["reason"]) == (0, "other_namespace")
        assert "with another adapter" in explained[1]["text"]
    generated = server.http.post("/generate", json={"text": PROMPT, "lora_path": "sql"})
    assert generated.status_code == 200, generated.text
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    by_name, plain = (
        server.http.post("/generate", json={"text": PROMPT, "sampling_params": sampling, **body}).json()[
            "output_ids"
        ]
        for body in ({"lora_path": "sql"}, {})
    )
    assert by_name == answer(server, model="sql")[0]
    assert plain == answer(server)[0]
    several = {"text": [PROMPT] * 3, "sampling_params": sampling, "lora_path": ["sql", None, "law"]}
    answers = [one["output_ids"] for one in server.http.post("/generate", json=several).json()]
    assert answers == [by_name, plain, answer(server, model="law")[0]]


def test_diagnostics_compare_adapters_and_not_their_names(server: LiveServer) -> None:
    def asked(path: str, model: str, **body: Any) -> dict[str, Any]:
        reply = server.http.post(path, json={**body, "model": model})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def message(model: str, earlier: str | None) -> dict[str, Any]:
        diagnostics = {"previous_message_id": earlier}
        return asked("/v1/messages", model, messages=MESSAGES, max_tokens=4, diagnostics=diagnostics)

    def response(model: str, **options: str) -> dict[str, Any]:
        return asked("/v1/responses", model, input=PROMPT, max_output_tokens=4, prompt_cache_options=options)

    base = server.http.get("/v1/models").json()["data"][0]["id"]
    for earlier, later in ((base, "law"), ("sql", base), ("law", "sql")):
        server.flush_cache()
        first = message(earlier, None)
        usage = first["usage"]
        n_prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
        n_in_pages = n_prompt // 16 * 16
        assert n_in_pages > 32
        reason = message(later, first["id"])["diagnostics"]["cache_miss_reason"]
        assert reason == {"type": "model_changed", "cache_missed_input_tokens": n_in_pages}
        answered = response(earlier)
        found = response(later, comparison_response_id=answered["id"])["prompt_cache_diagnostics"]
        assert found == {
            "type": "cache_miss",
            "reason": "model_changed",
            "cache_missed_tokens": n_in_pages,
            "comparison_reusable_tokens": 0,
        }
    first = message("sql", None)
    assert message("same", first["id"])["diagnostics"] is None
    answered = response("same")
    assert response("sql", comparison_response_id=answered["id"])["prompt_cache_diagnostics"]["type"] == "cache_hit"


def test_streams_and_the_log_of_requests_name_the_adapter(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "model": "law", "stream": True, "max_tokens": 3}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    assert {json.loads(event)["model"] for event in events} == {"law"}

    def logged() -> str:
        return json.loads(server.request_log.read_text().splitlines()[-1])["model"]

    wait_for(lambda: logged() == "law", "the log does not name the adapter")


def test_sessions_pins_and_matches_of_an_adapter(server: LiveServer) -> None:
    server.flush_cache()
    answer(server, model="sql", session_id="s")
    matched = [
        server.http.post("/cache/match", json={"prompt": PROMPT, "model": model}).json()["prompts"][0]
        for model in ("sql", "law")
    ]
    assert matched[0] != matched[1]
    pinned = [
        server.http.post("/cache/pin", json={"prompt": PROMPT, "model": model}).json()["pinned_tokens"]
        for model in ("sql", "law")
    ]
    assert pinned[0] > 32
    assert pinned[1] == 0
    server.http.post("/cache/pin", json={"prompt": PROMPT, "model": "sql", "ttl": "0s"})
    assert server.http.post("/sessions/s/close").status_code == 404, "the model alone has no such session"
    closed = server.http.post("/sessions/s/close", json={"model": "sql"})
    assert closed.json()["pages_demoted"]["device"] > 0
    dropped = server.http.post("/cache/invalidate", json={"prompt": PROMPT, "model": "sql"}).json()
    assert dropped["pages_dropped"]["device"] > 0


@pytest.mark.parametrize("body", [{"cache_salt": "hers"}, {"prompt": PROMPT, "cache_salt": "hers"}])
def test_an_invalidation_means_the_model_and_all_adapters(server: LiveServer, body: dict[str, str]) -> None:
    base = server.http.get("/v1/models").json()["data"][0]["id"]

    def cached() -> list[int]:
        prompt = {"prompt": PROMPT, "cache_salt": "hers"}
        replies = [
            server.http.post("/cache/explain", json={**prompt, "model": name}) for name in (base, "sql", "law")
        ]
        return [reply.json()["cached_tokens"] for reply in replies]

    for name in (base, "sql", "law"):
        answer(server, model=name, cache_salt="hers")
    before = cached()
    assert min(before) > 32
    server.http.post("/cache/invalidate", json={**body, "model": base})
    assert cached() == [0, *before[1:]]
    server.http.post("/cache/invalidate", json=body)
    assert cached() == [0, 0, 0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "model": "math"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "model": "math"}),
        ("/generate", {"text": "a", "lora_path": "math"}),
        ("/generate", {"text": ["a", "b"], "lora_path": ["sql", "math"]}),
        ("/cache/explain", {"prompt": "a", "model": "math"}),
    ],
)
def test_unknown_adapters_are_not_found(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 404
    assert "and its adapters 'sql', 'law', 'same'" in reply.text


def test_adapters_are_not_loaded_over_http_without_a_folder(server: LiveServer) -> None:
    reply = server.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
    assert reply.status_code == 400
    assert "--lora-dir" in reply.text
