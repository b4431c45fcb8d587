"""Activated LoRAs on a server: an adapter goes on with a chat of the model, and computes only its own turn."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import resolve
from support.device_support import load_oracle
from support.live import LiveServer, children, serving, wait_for
from support.lora import linear_modules, save_adapter

pytestmark = pytest.mark.nightly
SETTINGS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n" * 4
INVOCATION = "Judge this:"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="alone"),
        pytest.param(("--data-parallel-size", "2"), id="replicas"),
    ],
)
def server(
    request: pytest.FixtureRequest, sensitive: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("activated")
    flags = ("--device", "cpu", "--enable-lora", "--lora-dir", str(folder), "--restart-runtime", *request.param)
    with serving(sensitive, folder / "errors", *flags) as live:
        tokens = live.http.post("/tokenize", json={"prompt": INVOCATION, "add_special_tokens": False}).json()[
            "tokens"
        ]
        oracle = load_oracle(resolve(str(sensitive)))
        for seed, name in enumerate(("judge", "rank")):
            path = save_adapter(
                folder / name, oracle, linear_modules(oracle), seed=seed, alora_invocation_tokens=tokens
            )
            reply = live.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
            assert reply.status_code == 200, reply.text
        yield live


def complete(server: LiveServer, prompt: str, **body: Any) -> tuple[list[int], int]:
    reply: Any = server.complete(prompt=prompt, **SETTINGS, **body)
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def chat(server: LiveServer, messages: list[dict[str, str]], **body: Any) -> tuple[str, int]:
    body = {"messages": messages, **SETTINGS, **body}
    reply = server.http.post("/v1/chat/completions", json=body).json()
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prompts_of_the_model_are_found_and_those_of_adapters_by_it(server: LiveServer) -> None:
    """With replicas, each prompt goes to the one that got the prompts before."""
    prompt = f"{PROMPT}{INVOCATION} {PROMPT[:60]}"
    cold = {}
    for name in (None, "judge", "rank"):
        server.flush_cache()
        cold[name], n_cached = complete(server, prompt, **({} if name is None else {"model": name}))
        assert n_cached == 0
    assert len({str(tokens) for tokens in cold.values()}) == 3
    server.flush_cache()
    found = [complete(server, prompt, model=name) for name in ("judge", "rank", "judge")]
    base = complete(server, prompt)
    assert [tokens for tokens, _ in (*found, base)] == [cold[one] for one in ("judge", "rank", "judge", None)]
    before, whole = found[1][1], found[2][1]
    assert 0 < before < whole
    assert base[1] == before
    assert complete(server, PROMPT, model="judge") == (complete(server, PROMPT)[0], complete(server, PROMPT)[1])
    explained = server.http.post("/cache/explain", json={"prompt": prompt, "model": "rank"}).json()
    assert explained["cached_tokens"] == whole
    server.flush_cache()
    complete(server, prompt, model="judge")
    explained = server.http.post("/cache/explain", json={"prompt": prompt}).json()
    assert "with another adapter" in str(explained)
    match = {"prompt": prompt, "model": "judge"}
    matched = server.http.post("/cache/match", json=match).json()
    assert matched["prompts"][0]["matched_tokens"]["device"] == whole // 16 * 16


def test_a_chat_of_the_model_goes_on_with_an_adapter(server: LiveServer) -> None:
    """To the token: its answers too, which the adapter's prompt has in the tokens that the model has written."""
    question = {"role": "user", "content": f"{INVOCATION} is that right? {PROMPT[:100]}"}
    found = {}
    for name in (None, "judge"):
        server.flush_cache()
        answer, _ = chat(server, MESSAGES)
        later = [*MESSAGES, {"role": "assistant", "content": answer}, question]
        found[name] = chat(server, later, **({} if name is None else {"model": name}))
    assert found["judge"][0] != found[None][0]
    assert found["judge"][1] == found[None][1] > 100


def test_diagnostics_count_what_is_shared(server: LiveServer) -> None:
    server.flush_cache()
    body = {"input": PROMPT, "max_output_tokens": 16, "temperature": 0}
    first = server.http.post("/v1/responses", json=body).json()
    later = {
        **body,
        "model": "judge",
        "input": [{"role": "user", "content": PROMPT}, {"role": "user", "content": f"{INVOCATION} {PROMPT[:90]}"}],
        "prompt_cache_options": {"comparison_response_id": first["id"]},
    }
    reply = server.http.post("/v1/responses", json=later).json()
    diagnostics = reply["prompt_cache_diagnostics"]
    assert diagnostics["reason"] == "model_changed"
    assert diagnostics["cache_missed_tokens"] <= 16, (
        "all of the first prompt is the model's, whoever goes on with it"
    )


def test_diagnostics_tell_what_a_moved_invocation_costs(server: LiveServer) -> None:
    """In the words that the fields of both APIs have for it."""
    server.flush_cache()
    asked = {"role": "user", "content": f"{PROMPT}{INVOCATION} {PROMPT}"}
    more = [asked, {"role": "user", "content": f"{INVOCATION} {PROMPT[:60]}"}]
    body = {"model": "judge", "max_output_tokens": 4, "temperature": 0}
    first = server.http.post("/v1/responses", json={**body, "input": [asked]}).json()
    options = {"comparison_response_id": first["id"]}
    later = {**body, "input": more, "prompt_cache_options": options, "explain_cache": True}
    reply = server.http.post("/v1/responses", json=later).json()
    diagnostics = reply["prompt_cache_diagnostics"]
    assert (diagnostics["type"], diagnostics["reason"]) == ("cache_miss", "input_changed")
    assert 32 < diagnostics["cache_missed_tokens"] < diagnostics["comparison_reusable_tokens"]
    assert reply["usage"]["input_tokens_details"]["cache_miss"]["reason"] == "invocation"
    body = {"model": "judge", "max_tokens": 4, "temperature": 0}
    ids = {"previous_message_id": None}
    first = server.http.post("/v1/messages", json={**body, "messages": [asked], "diagnostics": ids}).json()
    ids = {"previous_message_id": first["id"]}
    reply = server.http.post("/v1/messages", json={**body, "messages": more, "diagnostics": ids}).json()
    reason = reply["diagnostics"]["cache_miss_reason"]
    assert reason == {
        "type": "messages_changed",
        "cache_missed_input_tokens": diagnostics["cache_missed_tokens"],
    }


def test_adapters_are_back_after_a_runtime_was_killed(server: LiveServer) -> None:
    prompt = f"{PROMPT}{INVOCATION} {PROMPT[:60]}"
    server.flush_cache()
    before = complete(server, prompt, model="judge")[0]
    for pid in children(server.process.pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.http.get("/health").status_code == 503, "still healthy")
    wait_for(lambda: server.http.get("/health").status_code == 200, "not healthy again")
    assert complete(server, prompt)[1] == 0
    tokens, n_cached = complete(server, prompt, model="judge")
    assert tokens == before
    assert n_cached > 32
