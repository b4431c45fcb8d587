"""Tests of ``/v1/rerank``, ``/v2/rerank`` and ``/v1/score`` with a small reranker, against ``LLM.score``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM
from radixkv.frontend.api.rerank.schema import parse_rerank
from support.checkpoints import save_checkpoint
from support.live import LiveServer, serving
from support.small_tokenizers import with_yes_and_no

QUERY = "Who lays eggs?"
DOCUMENTS = ["Hens lay eggs.", "Cows give milk.", "日本", "x " * 80, "Hens lay eggs."]
INSTRUCTION = "Find jokes."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = with_yes_and_no()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_checkpoint(folder, model_type="qwen3", vocab_size=tokenizer.get_vocab_size())
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--task", "score", "--max-model-len", "1024", "--max-total-tokens", "8192")
    with serving(folder, tmp_path_factory.mktemp("s") / "errors", *flags, "--served-model-name", "small") as live:
        yield live


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[float]]:
    """Scores of the documents, by instruction."""
    with LLM(folder, task="score", max_model_len=1024, max_total_tokens=8192, device="cpu") as llm:
        plain = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        instructed = llm.score(QUERY, DOCUMENTS, use_tqdm=False, instruction=INSTRUCTION)
    return {name: [one.outputs.score for one in found] for name, found in (("", plain), (INSTRUCTION, instructed))}


def post(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_results_are_sorted_and_have_the_texts_as_those_of_jina(
    server: LiveServer, expected: dict[str, list[float]]
) -> None:
    body = post(server, "/v1/rerank", model="small", query=QUERY, documents=DOCUMENTS)
    order = sorted(range(5), key=lambda index: -expected[""][index])
    assert body["results"] == [
        {"index": index, "document": {"text": DOCUMENTS[index]}, "relevance_score": expected[""][index]}
        for index in order
    ]
    assert order.index(0) == order.index(4) - 1  # equal documents stay in their order
    assert body["model"] == "small"
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 1500
    again = post(server, "/rerank", query=QUERY, documents=DOCUMENTS)
    assert again["results"] == body["results"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 1200


def test_the_best_documents_alone_as_objects(server: LiveServer, expected: dict[str, list[float]]) -> None:
    documents = [{"id": "7", "title": "a", "url": "b", "text": text} for text in DOCUMENTS]
    fields = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": False}
    found = post(server, "/v1/rerank", **fields, instruction=INSTRUCTION)["results"]
    best = sorted(range(5), key=lambda index: -expected[INSTRUCTION][index])[:2]
    assert found == [{"index": index, "relevance_score": expected[INSTRUCTION][index]} for index in best]
    for n in (0, 99, None):
        assert len(post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=n)["results"]) == 5


def test_other_fields_of_documents_do_not_count_as_texts() -> None:
    documents = [{"id": "0", "title": "a", "text": "b"}] * 1100
    body = json.dumps({"query": "a", "documents": documents}).encode()
    assert len(parse_rerank(body, 100).texts) == 1100


def test_numbers_of_texts_that_do_not_fit(server: LiveServer) -> None:
    reply = server.http.post("/v1/score", json={"text_1": [QUERY] * 3, "text_2": ["a", "b"]})
    message = "text_1 has 3 texts and text_2 has 2; give one text, or as many as text_2"
    assert reply.json()["error"]["message"] == message
    reply = server.http.post("/v1/rerank", json={"query": QUERY, "documents": []})
    assert reply.json()["error"]["message"] == "documents has no texts; give one or more"


def test_errors_of_documents_name_them(server: LiveServer) -> None:
    for document, message in (
        ({}, "documents[0].text is missing; give it"),
        ({"text": "a", "image_url": {}}, "documents[0] has an image; this model reads text only, leave it out"),
    ):
        reply = server.http.post("/v1/rerank", json={"query": QUERY, "documents": [document]})
        assert reply.json()["error"]["message"] == message


def test_what_a_server_tells_of_itself_is_for_its_task(server: LiveServer) -> None:
    """The line at the start has a request that works; SGLang's clients read ``is_generation``."""
    assert server.http.get("/model_info").json()["is_generation"] is False
    assert "TextDocument" in server.http.get("/openapi.json").text
    for path in ("/v1/messages/count_tokens", "/v1/chat/completions"):
        assert "--task score" in server.http.post(path, json={}).json()["error"]["message"]
    before = server.http.get("/cache/doctor").json()
    post(server, "/v1/rerank", query="Who reads a query that is new?", documents=["a", "b"])
    after = server.http.get("/cache/doctor").json()
    assert after["requests"] == before["requests"] + 2


def test_other_paths_are_refused_with_those_of_the_task(server: LiveServer) -> None:
    for path in ("/pooling", "/classify", "/nothing"):
        message = server.http.post(path, json={}).json()["error"]["message"]
        assert message.endswith("; this server answers /v1/rerank, /v2/rerank, /rerank, /v1/score, /score"), path


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"])
def test_a_megabyte_of_documents_is_read_on_each_route(server: LiveServer, path: str) -> None:
    """The error of the last document says that all of them were read, and none was computed."""
    first, second = ("text_1", "text_2") if path.endswith("score") else ("query", "documents")
    documents = ["x" * 500] * 2047 + ["x" * 20_000]
    reply = server.http.post(path, json={first: QUERY, second: documents})
    assert reply.json()["error"]["message"].startswith(f"{second}[2047]: ")
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    reply = server.http.post(path, json={first: QUERY, second: [*documents, "x"]})
    assert reply.json()["error"]["param"] == second
    assert "at most 2048" in reply.json()["error"]["message"]


def test_a_response_in_the_form_of_cohere(server: LiveServer, expected: dict[str, list[float]]) -> None:
    """As Cohere documents its second API: results have an index and a score."""
    body = post(server, "/v2/rerank", model="small", query=QUERY, documents=DOCUMENTS, top_n=3)
    order = sorted(range(5), key=lambda index: -expected[""][index])[:3]
    assert body["results"] == [{"index": index, "relevance_score": expected[""][index]} for index in order]
    assert body["meta"]["api_version"] == {"version": "2"}
    assert isinstance(body["id"], str)


def test_scores_of_pairs(server: LiveServer, expected: dict[str, list[float]]) -> None:
    body = post(server, "/v1/score", model="small", text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in body["data"]] == expected[""]
    assert [(one["index"], one["object"]) for one in body["data"]] == [(n, "score") for n in range(5)]
    one = post(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[1])
    assert [each["score"] for each in one["data"]] == expected[""][1:2]
    pairs = post(server, "/score", text_1=[QUERY, QUERY], text_2=DOCUMENTS[:2])
    assert [each["score"] for each in pairs["data"]] == expected[""][:2]


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        ("/rerank", {"query": QUERY, "documents": ["a", "a" * 800]}, "documents[1]", "context_length_exceeded"),
        ("/score", {"text_1": QUERY, "text_2": ["a", "a" * 1024]}, "text_2[1]", "context_length_exceeded"),
        ("/v1/rerank", {"query": QUERY, "documents": []}, "documents", "invalid_request"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a"] * 2049}, "documents", "invalid_request"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a" * 800]}, "documents", "context_length_exceeded"),
        ("/v1/rerank", {"query": QUERY, "documents": [{"title": "a"}]}, None, "invalid_request"),
        (
            "/v1/rerank",
            {"query": QUERY, "documents": [{"text": "a", "image": "b"}]},
            "documents",
            "invalid_request",
        ),
        ("/v1/rerank", {"documents": ["a"]}, "query", "invalid_request"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a"], "top_n": -1}, "top_n", "invalid_request"),
        (
            "/v1/rerank",
            {"query": QUERY, "documents": ["a"], "rank_fields": ["t"]},
            "rank_fields",
            "unsupported_feature",
        ),
        (
            "/v2/rerank",
            {"query": QUERY, "documents": ["a"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
            "unsupported_feature",
        ),
        ("/v1/score", {"text_1": [QUERY] * 3, "text_2": ["a", "b"]}, "text_1", "invalid_request"),
        ("/v1/score", {"text_1": QUERY, "text_2": "a", "model": "other"}, "model", "model_not_found"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(
    server: LiveServer, path: str, fields: dict[str, Any], param: str | None, code: str
) -> None:
    reply = server.http.post(path, json=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404 if code == "model_not_found" else 400, code)
    if param is not None and "[" in param:
        assert error["message"].startswith(f"{param}: ")
        param = param.partition("[")[0]
    assert param is None or error["param"] == param
