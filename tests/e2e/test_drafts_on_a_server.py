"""A server with drafts answers and streams as one without, in fewer steps, and says how many were right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live import serving

CONFIG = '{"method": "ngram", "num_speculative_tokens": 6}'
LIST = "".join(f"- item {n}: pears, plums, and {n} figs;\n" for n in range(6))
BODIES: list[dict[str, Any]] = [
    {"prompt": LIST + LIST, "max_tokens": 80, "temperature": 0, "ignore_eos": True, "logprobs": 2},
    {"prompt": LIST + LIST, "max_tokens": 80, "temperature": 0, "stop": ["plums"], "logit_bias": {"7": 5}},
    {"prompt": [7, 8, 9] * 9, "max_tokens": 60, "n": 2, "seed": 4, "logit_bias": {"7": 90, "8": 90}},
]


def streamed(client: httpx.Client, body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the joined text, the tokens, their logprobs and the finish reason of each choice, and the usage."""
    choices: dict[int, list[Any]] = {}
    usage: dict[str, Any] = {}
    body = {**body, "model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                text, tokens, logprobs, _ = choices.get(choice["index"], ["", [], [], None])
                found = choice.get("logprobs") or {}
                choices[choice["index"]] = [
                    text + choice["text"],
                    [*tokens, *found.get("tokens", ())],
                    [*logprobs, *found.get("token_logprobs", ())],
                    choice["finish_reason"],
                ]
    return [choices[index] for index in sorted(choices)], usage


@pytest.mark.nightly
def test_streams_are_equal_and_metrics_count_drafts(tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    for flags in (["--speculative-config", "off"], ["--speculative-config", CONFIG]):
        with (
            serving(Path("tiny"), tmp_path / "errors", *flags) as server,
            httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
        ):
            answers: list[Any] = []
            usages: list[dict[str, Any]] = []
            for body in BODIES:
                whole = client.post("/v1/completions", json={**body, "model": "tiny"}).json()
                in_chunks, usage = streamed(client, body)
                answers += [in_chunks, [(one["text"], one["logprobs"]) for one in whole["choices"]]]
                usages += [whole["usage"], usage]
            metrics = client.get("/metrics").text
            numbers = dict(re.findall(r"^radixkv:(spec_decode\w+|steps)_total\S* (\S+)$", metrics, re.MULTILINE))
            seen.append([answers, {name: float(value) for name, value in numbers.items()}, usages])
    (plain, before, usages_before), (drafted, after, usages_after) = seen
    assert drafted == plain
    assert set(before) == {"steps"}
    assert 0 < after["spec_decode_num_accepted_tokens"] < after["spec_decode_num_draft_tokens"]
    assert all("completion_tokens_details" not in usage for usage in usages_before)
    accepted, rejected = (
        sum(usage["completion_tokens_details"][f"{name}_prediction_tokens"] for usage in usages_after)
        for name in ("accepted", "rejected")
    )
    assert accepted == after["spec_decode_num_accepted_tokens"]
    assert accepted + rejected == after["spec_decode_num_draft_tokens"]
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert after[f"spec_decode_{name}_by_source"] == after[f"spec_decode_{name}"], "the method has one source"
    assert after["spec_decode_num_steps_without_overlap"] == after["steps"] < before["steps"], (
        "a CPU never overlaps"
    )


@pytest.mark.nightly
def test_a_prediction_changes_no_answer(tmp_path: Path) -> None:
    def ask(**body: Any) -> tuple[str, dict[str, int]]:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 60}
        body = asked | {"temperature": 0.9, "seed": 7, "ignore_eos": True} | body
        reply = client.post("/v1/chat/completions", json=body).json()
        return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens_details"]

    with (
        serving(Path("tiny"), tmp_path / "errors", "--speculative-config", CONFIG) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
    ):
        answer, _ = ask()
        for content in (answer, answer[:20] + "something else" + answer[30:], "Nothing of this comes."):
            again, details = ask(prediction={"type": "content", "content": content})
            assert again == answer
            assert details["accepted_prediction_tokens"] < 60
        assert 'by_source_total{source="prediction"}' in client.get("/metrics").text
