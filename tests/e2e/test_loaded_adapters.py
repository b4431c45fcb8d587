"""A server loads and unloads adapters while it runs, and has them again after its runtime was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.checkpoints import resolve
from support.device_support import load_oracle
from support.live import LiveServer, children, serving, wait_for
from support.lora import linear_modules, save_adapter

SETTINGS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n" * 4
KEY = "key-of-the-operator"


@pytest.fixture(scope="module")
def adapters(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters, and one of a rank that is too high."""
    folder = tmp_path_factory.mktemp("adapters")
    oracle = load_oracle(resolve(str(sensitive)))
    modules = linear_modules(oracle)
    for seed, (name, rank) in enumerate((("sql", 4), ("law", 4), ("wide", 17))):
        save_adapter(folder / name, oracle, modules, seed=seed, rank=rank)
    return folder


@pytest.fixture(scope="module")
def expected(sensitive: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Answers of a fresh server that began with the adapters."""
    flags = ("--lora-modules", *(f"{name}={adapters / name}" for name in ("sql", "law")))
    with serving(sensitive, tmp_path_factory.mktemp("fresh") / "errors", *flags) as live:
        found = {name: answer(live, name)[0] for name in ("sql", "law")}
        assert found["sql"] != found["law"]
        return found | {"": answer(live)[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora-dir")


@pytest.fixture(scope="module")
def server(sensitive: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    errors = tmp_path_factory.mktemp("server") / "errors"
    flags = (
        "--enable-lora",
        "--lora-dir",
        str(folder),
        "--max-cpu-loras",
        "2",
        "--restart-runtime",
        "--api-key",
        KEY,
    )
    with serving(sensitive, errors, *flags, key=KEY) as live:
        yield live
        wait_for(live.is_idle, "pages or requests are left")


@pytest.fixture(scope="module")
def replicas(sensitive: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    errors = tmp_path_factory.mktemp("replicas") / "errors"
    flags = ("--enable-lora", "--lora-dir", str(folder), "--data-parallel-size", "2", "--api-key", KEY)
    with serving(sensitive, errors, *flags, key=KEY) as live:
        yield live


@pytest.fixture(autouse=True)
def _no_adapters(server: LiveServer) -> None:
    for name in names(server)[1:]:
        assert unload(server, name).status_code == 200
    server.flush_cache()


def answer(server: LiveServer, model: str | None = None) -> tuple[list[int], int]:
    reply: Any = server.complete(prompt=PROMPT, **SETTINGS, **({} if model is None else {"model": model}))
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def names(server: LiveServer) -> list[str]:
    return [one["id"] for one in server.http.get("/v1/models").json()["data"]]


def load(server: LiveServer, name: str, path: Path | str, **more: Any) -> httpx.Response:
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def unload(server: LiveServer, name: str) -> httpx.Response:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def placed(adapters: Path, name: str, folder: Path) -> Path:
    """Copies an adapter to a folder, in place of one there."""
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(adapters / name, folder)


def test_load_use_replace_and_load_again(
    server: LiveServer, adapters: Path, folder: Path, expected: dict[str, list[int]]
) -> None:
    path = placed(adapters, "sql", folder / "mine")
    reply = load(server, "mine", path)
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert names(server)[1:] == ["mine"]
    assert server.http.get("/v1/models/mine").json()["root"] == str(path)
    assert answer(server, "mine") == (expected["sql"], 0)
    assert answer(server) == (expected[""], 0)
    assert server.metrics("loras_loaded")[0] == 1
    n_bytes = server.metric("lora_bytes")
    assert n_bytes > 0
    placed(adapters, "law", path)
    assert load(server, "mine", path, load_inplace=True).status_code == 200
    assert answer(server, "mine") == (expected["law"], 0), "never a page of the bytes before"
    reply = unload(server, "mine")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert names(server)[1:] == []
    assert server.http.post("/v1/completions", json={"prompt": "a", "model": "mine"}).status_code == 404
    wait_for(lambda: server.metrics("loras_loaded", "lora_bytes") == [0, 0], "the weights are not freed")
    placed(adapters, "sql", path)
    assert load(server, "again", path).status_code == 200
    again, n_cached = answer(server, "again")
    assert again == expected["sql"]
    assert n_cached > 32, "the same bytes hit, whatever the name"
    assert answer(server)[1] > 32


def test_sglangs_routes(server: LiveServer, adapters: Path, folder: Path) -> None:
    path = placed(adapters, "sql", folder / "mine")
    reply = server.http.post("/load_lora_adapter", json={"lora_name": "mine", "lora_path": "mine", "pinned": False})
    assert reply.json() == {"success": True, "error_message": "", "loaded_adapters": {"mine": str(path)}}
    reply = server.http.post("/load_lora_adapter", json={"lora_name": "mine", "lora_path": "mine"})
    assert reply.status_code == 400
    found = reply.json()
    assert "is loaded already" in found["error_message"] == found["error"]["message"]
    assert (found["success"], found["loaded_adapters"]) == (False, {"mine": str(path)})
    reply = server.http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "mine", "pinned": True})
    assert (reply.status_code, "pinned true is not supported" in reply.json()["error_message"]) == (400, True)
    reply = server.http.post("/generate", json={"text": "a", "lora_id": "mine"})
    assert (reply.status_code, "use lora_path" in reply.text) == (400, True)
    reply = server.http.post("/unload_lora_adapter", json={"lora_name": "mine"})
    assert reply.json() == {"success": True, "error_message": "", "loaded_adapters": {}}
    reply = server.http.post("/unload_lora_adapter", json={"lora_name": "mine"})
    assert (reply.status_code, reply.json()["success"]) == (404, False)


@pytest.mark.nightly
def test_unloading_lets_running_requests_end(
    server: LiveServer, adapters: Path, folder: Path, expected: dict[str, list[int]]
) -> None:
    """Other loads and requests come meanwhile."""
    load(server, "mine", placed(adapters, "sql", folder / "mine"))
    body = {"prompt": PROMPT, "model": "mine", **SETTINGS, "max_tokens": 300, "stream": True}
    tokens: list[int] = []
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        is_unloaded = False
        for line in lines:
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                tokens += event["choices"][0]["token_ids"]
                if not is_unloaded:
                    assert unload(server, "mine").status_code == 200
                    n_loaded, n_bytes = server.metrics("loras_loaded", "lora_bytes")
                    is_unloaded = True
        assert is_unloaded
    assert len(tokens) == 300
    assert tokens[:12] == expected["sql"]
    assert n_loaded == 0
    assert n_bytes > 0, "the request was still running"
    wait_for(lambda: server.metric("lora_bytes") == 0, "the weights are not freed")
    load(server, "mine", folder / "mine")
    whole: Any = server.complete(prompt=PROMPT, model="mine", **{**SETTINGS, "max_tokens": 300})
    assert whole["choices"][0]["token_ids"] == tokens, "as with the adapter all the time"


def replies_beside(server: LiveServer, model: str, work: Callable[[], None]) -> list[httpx.Response]:
    """Returns the replies to requests for a model that clients send while ``work`` runs."""
    stop, replies = threading.Event(), list[httpx.Response]()
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}),
        ("/v1/completions", {"prompt": [PROMPT * 4, PROMPT, "a"], "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True}),
        ("/cache/match", {"prompt": PROMPT}),
        ("/cache/explain", {"prompt": PROMPT}),
        ("/cache/pin", {"prompt": PROMPT, "ttl": "1s"}),
    ]

    def ask(path: str, body: dict[str, Any]) -> None:
        while not stop.is_set():
            replies.append(server.http.post(path, json=body | {"model": model}))

    threads = [threading.Thread(target=ask, args=one) for one in bodies]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return replies


@pytest.mark.parametrize("server_name", ["server", pytest.param("replicas", marks=pytest.mark.nightly)])
def test_requests_for_a_name_never_fail_while_its_adapter_is_replaced(
    request: pytest.FixtureRequest, server_name: str, adapters: Path, folder: Path
) -> None:
    server = request.getfixturevalue(server_name)
    paths = [placed(adapters, name, folder / name) for name in ("sql", "law")]
    assert load(server, "mine", paths[0]).status_code == 200
    n_bytes = server.metric("lora_bytes")

    def reload() -> None:
        for number in range(1, 13):
            assert load(server, "mine", paths[number % 2], load_inplace=True).status_code == 200

    replies = replies_beside(server, "mine", reload)
    assert {reply.status_code for reply in replies} == {200}, [one.text for one in replies if one.is_error][:1]
    assert not any('"error"' in reply.text for reply in replies)
    wait_for(lambda: server.metric("lora_bytes") == n_bytes, "what was replaced is not freed")
    assert unload(server, "mine").status_code == 200
    wait_for(lambda: server.metric("lora_bytes") == 0, "what was unloaded is not freed")


@pytest.mark.parametrize("server_name", ["server", pytest.param("replicas", marks=pytest.mark.nightly)])
def test_requests_beside_unloads_are_served_or_find_no_model(
    request: pytest.FixtureRequest, server_name: str, adapters: Path, folder: Path
) -> None:
    server = request.getfixturevalue(server_name)
    path = placed(adapters, "sql", folder / "mine")

    def reload() -> None:
        for _ in range(12):
            assert load(server, "mine", path).status_code == 200
            time.sleep(0.02)
            assert unload(server, "mine").status_code == 200

    replies = replies_beside(server, "mine", reload)
    assert {reply.status_code for reply in replies} == {200, 404}, [one.text for one in replies][-6:]
    errors = {reply.text for reply in replies if reply.is_error}
    assert all("there is no model" in error for error in errors), errors


@pytest.mark.nightly
def test_the_adapters_are_back_after_the_runtime_was_killed(
    server: LiveServer, adapters: Path, folder: Path, expected: dict[str, list[int]]
) -> None:
    """One whose files have changed is not: its name means what was loaded."""
    load(server, "mine", placed(adapters, "sql", folder / "mine"))
    load(server, "other", placed(adapters, "law", folder / "other"))
    placed(adapters, "sql", folder / "other")
    os.kill(server.runtime_pid, signal.SIGKILL)
    wait_for(lambda: server.http.get("/health").status_code == 503, "still healthy")
    wait_for(lambda: server.http.get("/health").status_code == 200, "not healthy again")
    (server.runtime_pid,) = children(server.process.pid)
    assert names(server)[1:] == ["mine"]
    assert answer(server, "mine") == (expected["sql"], 0)
    assert answer(server) == (expected[""], 0)
    assert load(server, "other", folder / "other").status_code == 200
    assert answer(server, "other")[0] == expected["sql"]


@pytest.mark.nightly
def test_loads_beside_requests(
    server: LiveServer, adapters: Path, folder: Path, expected: dict[str, list[int]]
) -> None:
    """Requests of the model alone and of an adapter answer as ever while another one comes and goes."""
    load(server, "mine", placed(adapters, "sql", folder / "mine"))
    path = placed(adapters, "law", folder / "other")
    stop, found = threading.Event(), list[tuple[str | None, list[int]]]()

    def ask(model: str | None) -> None:
        while not stop.is_set():
            found.append((model, answer(server, model)[0]))

    threads = [threading.Thread(target=ask, args=(model,)) for model in (None, "mine")]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert load(server, "other", path).status_code == 200
        assert answer(server, "other")[0] == expected["law"]
        assert unload(server, "other").status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert {model for model, _ in found} == {None, "mine"}
    for model, tokens in found:
        assert tokens == expected["sql" if model else ""]


def test_wrong_uses(server: LiveServer, adapters: Path, folder: Path) -> None:
    load(server, "mine", placed(adapters, "sql", folder / "mine"))
    placed(adapters, "wide", folder / "wide")
    (folder / "empty").mkdir(exist_ok=True)
    if not (folder / "link").exists():
        (folder / "link").symlink_to(adapters / "sql")
        shutil.copytree(adapters / "sql", folder / "linked")
        (folder / "linked" / "adapter_model.safetensors").unlink()
        (folder / "linked" / "adapter_model.safetensors").symlink_to(adapters / "sql" / "adapter_model.safetensors")
    base = names(server)[0]
    for name, path, status, text in (
        ("mine", "mine", 400, "is loaded already"),
        (base, "mine", 400, "which is the model's"),
        ("a\nb", "mine", 400, "give 1 to 256 printable characters"),
        ("", "mine", 400, "give 1 to 256 printable characters"),
        ("a", adapters / "sql", 400, "is not inside the folder of --lora-dir"),
        ("a", "../x", 400, "is not inside the folder of --lora-dir"),
        ("a", "link", 400, "leads out of it"),
        ("a", "linked", 400, "leads out of it"),
        ("a", "a\0b", 400, "is not inside the folder"),
        ("a", "nowhere", 400, "is no folder"),
        ("a", "a" * 300, 400, "cannot be read: File name too long"),
        ("a", "empty", 400, "has no adapter_config.json"),
        ("a", "wide", 400, "above the limit of 16"),
    ):
        reply = load(server, name, path)
        assert (reply.status_code, text in reply.text) == (status, True), reply.text
    assert load(server, "second", "mine").status_code == 200
    reply = load(server, "third", "mine")
    assert reply.status_code == 400
    assert "one more than max_cpu_loras 2; unload one of 'mine', 'second'" in reply.text
    reply = unload(server, "third")
    assert reply.status_code == 404
    assert "loaded: 'mine', 'second'" in reply.text
    for body in ({}, {"lora_name": "a"}, {"lora_name": 5, "lora_path": "a"}):
        assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 400
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"):
        reply = httpx.post(f"{server.base_url}{path}", json={"lora_name": "mine", "lora_path": "mine"})
        assert reply.status_code == 401
    assert names(server)[1:] == ["mine", "second"]
