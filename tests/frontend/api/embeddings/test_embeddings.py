"""Tests of ``/v1/embeddings`` on a server with a small Qwen3, against Transformers."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.checkpoints import save_checkpoint
from support.live import LIMIT_S, LiveServer, serving, wait_for
from support.small_tokenizers import byte_letters

TEXTS = ["Hens lay eggs.", "Cows give milk, " * 12, "日本"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer appends an end token."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_letters(special=["<end>"])
    tokenizer.post_processor = TemplateProcessing("$A <end>", special_tokens=[("<end>", 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    save_checkpoint(folder, model_type="qwen3", vocab_size=tokenizer.get_vocab_size())
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose queue is shorter than some requests."""
    flags = "--task embed --max-model-len 512 --max-total-tokens 4096 --served-model-name small".split()
    flags += ["--max-num-seqs", "4", "--max-queued-requests", "8"]
    with serving(folder, tmp_path_factory.mktemp("s") / "errors", *flags) as live:
        yield live


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def states(prompts: Sequence[Sequence[int]], n: int | None = None) -> Tensor:
        with torch.no_grad():
            found = [model.model(torch.tensor([ids])).last_hidden_state[0, -1, :n] for ids in prompts]
        return torch.nn.functional.normalize(torch.stack(found), dim=-1)

    return states


def embed(server: LiveServer, given: Any, **fields: Any) -> dict[str, Any]:
    reply = server.http.post("/v1/embeddings", json={"input": given, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def vectors(body: dict[str, Any]) -> Tensor:
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    return torch.tensor([one["embedding"] for one in body["data"]])


def ids_of(server: LiveServer, text: str) -> list[int]:
    return server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_texts_and_ids_in_every_form(server: LiveServer, oracle: Any) -> None:
    prompts = [ids_of(server, text) for text in TEXTS]
    assert [ids[-1] for ids in prompts] == [256] * 3
    expected = oracle(prompts)
    for given, part in (
        (TEXTS, expected),
        (TEXTS[0], expected[:1]),
        (prompts, expected),
        (prompts[1], expected[1:2]),
        ([TEXTS[1], TEXTS[0], TEXTS[1]], expected[[1, 0, 1]]),
    ):
        torch.testing.assert_close(vectors(embed(server, given)), part, rtol=0, atol=2e-6)
    raw = embed(server, TEXTS[0], add_special_tokens=False)
    torch.testing.assert_close(vectors(raw), oracle([prompts[0][:-1]]), rtol=0, atol=2e-6)


def test_many_long_lists_of_ids_are_inputs(server: LiveServer, oracle: Any) -> None:
    """The body is so long that lists are decoded one at a time, and has more than the queue holds."""
    prompts = [[(n * m) % 250 for m in range(1, 200)] for n in range(1, 101)]
    found = vectors(embed(server, prompts))
    torch.testing.assert_close(found[[0, 99]], oracle([prompts[0], prompts[99]]), rtol=0, atol=5e-6)


def test_encoding_and_dimensions(server: LiveServer, oracle: Any) -> None:
    plain = embed(server, TEXTS, dimensions=7)
    coded = embed(server, TEXTS, dimensions=7, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() for one in coded["data"]]
    assert decoded == [one["embedding"] for one in plain["data"]]
    expected = oracle([ids_of(server, text) for text in TEXTS], 7)
    torch.testing.assert_close(vectors(plain), expected, rtol=0, atol=2e-6)


def test_usage_counts_tokens_and_what_was_cached(server: LiveServer) -> None:
    text = "A text that no other test has sent, of some pages. " * 2
    n_tokens = len(ids_of(server, text))
    before = server.metrics("prompt_tokens_total", "generation_tokens_total")
    salted = [embed(server, text, cache_salt="salt") for _ in range(2)]
    other = embed(server, text, cache_salt="other")
    after = server.metrics("prompt_tokens_total", "generation_tokens_total")
    for body in (*salted, other):
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            n_tokens,
            0,
            n_tokens,
        )
        assert (body["object"], body["model"]) == ("list", "small")
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (*salted, other)]
    assert cached == [0, (n_tokens - 1) // 16 * 16, 0]
    assert salted[0]["data"] == salted[1]["data"] == other["data"]
    assert [new - old for new, old in zip(after, before, strict=True)] == [3 * n_tokens, 0]
    assert server.is_idle()


@pytest.mark.parametrize(
    ("fields", "param", "code", "said"),
    [
        ({"input": []}, "input", "invalid_request", "empty"),
        ({"input": [TEXTS[0], 5]}, "input", "invalid_request", ""),
        ({"input": ["a"] * 2049}, "input", "invalid_request", "at most 2048"),
        ({"input": [[1]] * 2049}, "input", "invalid_request", "at most 2048"),
        ({"input": [10_000]}, "input", "invalid_request", "vocabulary"),
        ({"input": "x" * 513}, "input", "context_length_exceeded", "512 tokens"),
        ({"input": "x" * 512}, "input", "context_length_exceeded", "513 tokens"),
        ({"input": [1] * 513}, "input", "context_length_exceeded", "513 tokens"),
        ({"input": ["a", "x" * 513]}, "input", "context_length_exceeded", "input[1]: "),
        ({"input": ["a", "b", "x" * 512]}, "input", "context_length_exceeded", "input[2]: "),
        ({"input": [*["a" * 400] * 90, "x" * 512]}, "input", "context_length_exceeded", "input[90]: "),
        ({"input": [[1], [10_000]]}, "input", "invalid_request", "input[1]: "),
        ({"input": [[1], []]}, "input", "invalid_request", "input[1]: "),
        ({"input": [[1]] + [[1] * 513] * 20}, "input", "context_length_exceeded", "input[1]: "),
        ({"input": "a", "dimensions": 49}, "dimensions", "invalid_request", "1 to 48"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_request", "1 to 48"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_request", ""),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_feature", "truncated"),
        (
            {"messages": [{"role": "user", "content": "a"}], "input": "a"},
            "messages",
            "unsupported_feature",
            "input",
        ),
        ({"input": "a", "priority": 1 << 40}, "priority", "invalid_request", ""),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    server: LiveServer, fields: dict[str, Any], param: str, code: str, said: str
) -> None:
    reply = server.http.post("/v1/embeddings", json=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code)
    assert said in error["message"]
    assert ("]: " in error["message"]) == ("]: " in said)


def test_the_longest_input_fits(server: LiveServer) -> None:
    assert embed(server, "x" * 511)["usage"]["prompt_tokens"] == 512


@pytest.mark.parametrize(
    ("path", "task"),
    [
        ("/v1/completions", "generate"),
        ("/v1/chat/completions", "generate"),
        ("/v1/responses", "generate"),
        ("/v1/messages", "generate"),
        ("/generate", "generate"),
        ("/v1/rerank", "score"),
        ("/v2/rerank", "score"),
        ("/v1/score", "score"),
        ("/rerank", "score"),
        ("/score", "score"),
    ],
)
def test_routes_of_other_tasks_are_refused_with_the_task_that_has_them(
    server: LiveServer, path: str, task: str
) -> None:
    reply = server.http.post(path, json={"prompt": "a"})
    assert reply.status_code == 400
    assert f"{path} is not supported" in reply.text
    assert f"start one with --task {task}" in reply.text


def test_other_paths_are_refused_with_that_of_the_task(server: LiveServer) -> None:
    for path in ("/pooling", "/encode", "/v1/nothing"):
        message = server.http.post(path, json={}).json()["error"]["message"]
        assert message.endswith("; this server answers /v1/embeddings"), path


def _has_more_than(live: LiveServer, n_tokens: float) -> bool:
    return live.metric("prompt_tokens_total") > n_tokens


@pytest.mark.nightly
def test_sigterm_lets_a_request_of_many_steps_end(folder: Path, tmp_path: Path) -> None:
    """Most of its prompts are not at the runtime yet when the signal comes."""
    flags = "--task embed --max-model-len 512 --max-total-tokens 1024 --max-num-seqs 2".split()
    with serving(folder, tmp_path / "errors", *flags) as live, ThreadPoolExecutor(1) as threads:
        n_prompts = 150
        request: Future[httpx.Response] | None = None
        while request is None or request.done():  # a busy machine may notice only its end: then a longer one
            if request is not None:
                os.kill(live.runtime_pid, signal.SIGCONT)
            n_prompts, n_computed = 2 * n_prompts, live.metric("prompt_tokens_total")
            given = [[n % 250] * 60 for n in range(n_prompts)]
            request = threads.submit(
                httpx.post, f"{live.base_url}/v1/embeddings", json={"input": given}, timeout=LIMIT_S
            )
            wait_for(partial(_has_more_than, live, n_computed), "the request never ran")
            os.kill(live.runtime_pid, signal.SIGSTOP)  # stands for steps that outlast the checks below
        live.process.send_signal(signal.SIGTERM)
        wait_for(lambda: live.http.get("/health").status_code == 503, "still healthy")
        refused = live.http.post("/v1/embeddings", json={"input": "late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        os.kill(live.runtime_pid, signal.SIGCONT)
        reply = request.result()
        assert reply.status_code == 200, reply.text
        assert len(vectors(reply.json())) == len(given)
        assert live.process.wait(timeout=LIMIT_S) == 0
