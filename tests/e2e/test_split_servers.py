"""Two servers with a shared store, one of which computes prompts and the other decodes: see docs/routing.md."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, OTHERS, random_ids
from support.live import LiveServer, serving
from support.split_router import routing

FLAGS = ("--host-memory", "64MiB", "--load-policy", "always", "--max-num-seqs", "8")
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
COMPUTED = {"device": 0, "host": 0, "storage": 0}
_numbers = itertools.count()


class Split(NamedTuple):
    """The two servers, and one without a store, whose answers are right."""

    prefill: LiveServer
    decode: LiveServer
    alone: LiveServer
    store: Path


def text() -> str:
    """Returns a text that no server has seen."""
    return f"{next(_numbers):03} farmers have 12 hens, and each of them lays 5 eggs a week. How many is that? " * 8


def chat() -> dict[str, Any]:
    """Returns the body of a chat that no server has seen."""
    return {"messages": [{"role": "user", "content": text()}], **GREEDY}


def post(server: LiveServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    reply = server.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def sources(reply: dict[str, Any]) -> dict[str, int]:
    """Returns where the prompt of a completion or chat came from."""
    return reply["usage"]["prompt_tokens_details"]["cached_tokens_details"]


def whole_pages(n_prompt: int) -> int:
    """Returns how many tokens of a prompt another server finds: it computes at least the last one."""
    return min(n_prompt // 16 * 16, n_prompt - 1)


@pytest.fixture(scope="module")
def split(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("split")
    with ExitStack() as stack:

        def start(name: str, *flags: str) -> LiveServer:
            (folder / name).mkdir()
            flags = ("--served-model-name", "m", *flags)
            pool = ("--max-total-tokens", "1024" if name == "decode" else "2048")
            return stack.enter_context(serving(sensitive, folder / name / "errors", *pool, *flags))

        shared = (*FLAGS, "--cache-url", f"file://{folder}/kv")
        yield Split(start("prefill", *shared), start("decode", *shared), start("alone"), folder / "kv")


def test_the_reply_to_max_tokens_0_comes_once_the_store_has_the_prompt(split: Split) -> None:
    body = chat()
    computed = post(split.prefill, "/v1/chat/completions", {**body, "max_tokens": 0})
    (choice,), usage = computed["choices"], computed["usage"]
    n_whole = usage["prompt_tokens"] // 16 * 16
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens_details"]["stored_tokens"] == {"host": n_whole, "storage": n_whole}
    (matched,) = post(split.decode, "/cache/match", body)["prompts"]
    assert matched == {"prompt_tokens": usage["prompt_tokens"], "matched_tokens": COMPUTED}  # nothing is looked up

    decoded = post(split.decode, "/v1/chat/completions", body)
    assert sources(decoded) == COMPUTED | {"storage": whole_pages(usage["prompt_tokens"])}
    assert decoded["choices"] == post(split.alone, "/v1/chat/completions", body)["choices"]
    (matched,) = post(split.decode, "/cache/match", body)["prompts"]
    assert matched["matched_tokens"]["device"] == n_whole


def test_all_apis_compute_for_the_other_server(split: Split) -> None:
    said, whole = text(), {"type": "ephemeral"}
    messages = [{"role": "user", "content": [{"type": "text", "text": said, "cache_control": whole}]}]
    greedy = {"max_tokens": 8, "temperature": 0}
    reply = post(split.prefill, "/v1/messages", {"model": "m", "messages": messages, "max_tokens": 0})
    n_stored = reply["usage"]["stored_tokens"]["storage"]
    assert n_stored > 128
    reply = post(split.decode, "/v1/messages", {"model": "m", "messages": messages, **greedy})
    assert 0 <= n_stored - reply["usage"]["cache_read_input_tokens"] <= 16

    body = {"input": text(), "max_output_tokens": 8, "temperature": 0}
    reply = post(split.prefill, "/v1/responses", {**body, "prompt_cache_options": {"prewarm": True}})
    n_stored = reply["usage"]["input_tokens_details"]["stored_tokens"]["storage"]
    assert n_stored > 128
    reply = post(split.decode, "/v1/responses", body)
    assert 0 <= n_stored - reply["usage"]["input_tokens_details"]["cached_tokens"] <= 16

    said = text()
    reply = post(split.prefill, "/generate", {"text": said, "sampling_params": {"max_new_tokens": 0}})
    n_stored = reply["meta_info"]["stored_tokens"]["storage"]
    assert n_stored > 128
    reply = post(split.decode, "/generate", {"text": said, "sampling_params": {"max_new_tokens": 8}})
    assert 0 <= n_stored - reply["meta_info"]["cached_tokens_details"]["storage"] <= 16


def test_several_choices_and_prompts_of_completions(split: Split) -> None:
    body = {"prompt": [text(), text()], "n": 3, **GREEDY, "temperature": 1.0, "seed": 5}
    computed = post(split.prefill, "/v1/completions", {**body, "max_tokens": 0})
    assert [choice["text"] for choice in computed["choices"]] == ["", ""]
    n_stored = computed["usage"]["prompt_tokens_details"]["stored_tokens"]["storage"]
    decoded = post(split.decode, "/v1/completions", body)
    assert n_stored > 256
    assert 0 <= n_stored - sources(decoded)["storage"] <= 32
    assert decoded["choices"] == post(split.alone, "/v1/completions", body)["choices"]


def test_a_stream_of_the_decoding_server(split: Split) -> None:
    body = chat()
    post(split.prefill, "/v1/chat/completions", {**body, "max_tokens": 0})
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = split.decode.http.post("/v1/chat/completions", json=streamed).text.splitlines()
    chunks = [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]
    answer = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    expected = post(split.alone, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert answer == expected
    assert sources(chunks[-1])["storage"] > 128


def test_a_salt_separates_what_the_servers_share(split: Split) -> None:
    body = {"prompt": text(), **GREEDY}
    post(split.prefill, "/v1/completions", {**body, "max_tokens": 0, "cache_salt": "hers"})
    expected = post(split.alone, "/v1/completions", body)["choices"]
    other = post(split.decode, "/v1/completions", {**body, "cache_salt": "his"})
    assert (sources(other), other["choices"]) == (COMPUTED, expected)
    own = post(split.decode, "/v1/completions", {**body, "cache_salt": "hers"})
    assert (sources(own)["storage"] > 128, own["choices"]) == (True, expected)


def test_a_prompt_for_which_the_decoding_server_has_no_room(split: Split) -> None:
    body = {"prompt": random_ids(1500, seed=1), **GREEDY}
    computed = post(split.prefill, "/v1/completions", {**body, "max_tokens": 0})
    assert computed["usage"]["prompt_tokens_details"]["stored_tokens"]["storage"] == 1488
    refused = post(split.decode, "/v1/completions", body, status=400)
    assert refused["error"]["code"] == "context_length_exceeded"


def test_the_store_loses_the_prompt_in_between(split: Split) -> None:
    body = {"prompt": text(), **GREEDY}
    post(split.prefill, "/v1/completions", {**body, "max_tokens": 0})
    for folder in split.store.iterdir():
        shutil.rmtree(folder)
    expected = post(split.alone, "/v1/completions", body)["choices"]
    decoded = post(split.decode, "/v1/completions", body)
    assert (sources(decoded), decoded["choices"]) == (COMPUTED, expected)


def test_the_router_has_long_prompts_computed_once(split: Split) -> None:
    with routing(split.prefill.base_url, split.decode.base_url) as router:
        body = {**chat(), "n": 2, "stop": "no such text"}
        expected = post(split.alone, "/v1/chat/completions", body)["choices"]
        found = []
        n_computed = split.prefill.metric("prompt_tokens_total")
        for _ in range(2):
            reply = router.post("/v1/chat/completions", json=body).json()
            assert reply["choices"] == expected
            found.append(sources(reply))
        n_prompt = reply["usage"]["prompt_tokens"]
        assert found[0] == COMPUTED | {"storage": whole_pages(n_prompt)}
        assert found[1]["device"] > n_prompt - 16
        assert split.prefill.metric("prompt_tokens_total") == n_computed + n_prompt
        streamed = router.post("/v1/chat/completions", json={**chat(), "stream": True, "logprobs": True})
        assert streamed.text.endswith("data: [DONE]\n\n")

        brief = router.post("/v1/completions", json={"prompt": "two hens", **GREEDY}).json()
        assert sources(brief)["storage"] == 0
        said = {"input": text(), "max_output_tokens": 8, "temperature": 0}
        usage = router.post("/v1/responses", json=said).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] > 128
        said = {"model": "m", "messages": [{"role": "user", "content": text()}], "max_tokens": 8}
        said["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        assert router.post("/v1/messages", json=said).json()["usage"]["cache_read_input_tokens"] > 128
        refused = router.post("/v1/completions", json={"prompt": text(), "temperature": -1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")


def test_the_decoding_server_computes_what_the_other_one_does_not(split: Split) -> None:
    with routing("http://127.0.0.1:1", split.decode.base_url) as router:
        body = chat()
        reply = router.post("/v1/chat/completions", json=body).json()
        assert sources(reply)["storage"] == 0
        assert reply["choices"] == post(split.alone, "/v1/chat/completions", body)["choices"]


@pytest.mark.parametrize("field", ["stream", "logprobs", "prompt_logprobs"])
def test_max_tokens_0_asks_for_no_output(split: Split, field: str) -> None:
    value = 1 if field == "prompt_logprobs" else True
    refused = post(split.prefill, "/v1/chat/completions", {**chat(), "max_tokens": 0, field: value}, status=400)
    assert refused["error"]["param"] == field


def test_a_server_without_tiers_says_nothing_of_them(split: Split) -> None:
    details = post(split.alone, "/v1/completions", {"prompt": text(), "max_tokens": 0})["usage"]
    assert details["prompt_tokens_details"] == {"cached_tokens": 0}


MODELS = {
    "qwen3.5": HYBRIDS["qwen3.5"],
    "gemma3": {
        **OTHERS["gemma3"],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 48,
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_states_and_windows_reach_the_other_server(name: str, tmp_path: Path) -> None:
    """And another dtype finds nothing of them, and answers all the same."""
    model = tmp_path / "model"
    save_checkpoint(model, **MODELS[name])
    flags = (
        *FLAGS,
        "--max-total-tokens",
        "1024",
        "--max-model-len",
        "1024",
        "--cache-url",
        f"file://{tmp_path}/kv",
    )
    body = {"prompt": random_ids(390, seed=1), **GREEDY, "return_token_ids": True}
    with ExitStack() as stack:

        def start(name: str, dtype: str = "float32") -> LiveServer:
            return stack.enter_context(serving(model, tmp_path / name, *flags, "--dtype", dtype))

        prefill, decode, other = start("prefill"), start("decode"), start("other", "bfloat16")
        computed = post(prefill, "/v1/completions", {**body, "max_tokens": 0})
        assert computed["usage"]["prompt_tokens_details"]["stored_tokens"]["storage"] == 384
        decoded = post(decode, "/v1/completions", body)
        assert sources(decoded) == COMPUTED | {"storage": 384}
        assert decoded["choices"] == post(prefill, "/v1/completions", body)["choices"]
        assert sources(post(other, "/v1/completions", body)) == COMPUTED
