"""Tests of ``radixkv explain`` with a fake server; tests/e2e has tests with a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli import main
from support.fake_openai import FakeServer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def server(fake: FakeServer) -> FakeServer:
    """A server whose tokens are letters."""
    fake.responses = {
        "/cache/explain": lambda body: {
            "prompt_tokens": len(body["prompt"]),
            "cached_tokens": 16,
            "reason": "differs",
            "first_difference": {
                "position": 18,
                "prompt_token": {"id": 115, "text": "s"},
                "cached_token": {"id": 63, "text": "?"},
            },
            "text": "16 of 26 are cached.",
        }
    }
    return fake


def explain(server: FakeServer, *flags: str) -> int:
    return main(["explain", *flags, "--base-url", server.address])


def test_it_shows_the_text_around_the_first_difference(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(server, LETTERS, "--cache-salt", "mine", "--api-key", "secret") == 0
    assert capsys.readouterr().out.splitlines() == [
        "16 of 26 are cached.",
        "  up to token 18: ...'ghijklmnopqr'",
        "  and from there on: 'stuvwxyz'",
    ]
    assert server.requests[1][:2] == ("/cache/explain", {"prompt": list(map(ord, LETTERS)), "cache_salt": "mine"})
    assert {key for _, _, key in server.requests} == {"Bearer secret"}


def test_where_nothing_differs_it_shows_the_end_of_the_match(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"prompt_tokens": 26, "cached_tokens": 8, "reason": "evicted", "text": "8 of 26."}
    server.responses["/cache/explain"] = lambda _: found
    assert explain(server, LETTERS) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  up to token 8: 'abcdefgh'",
        "  and from there on: 'ijklmnopqrst'...",
    ]
    found["cached_tokens"] = 0
    explain(server, LETTERS)
    assert capsys.readouterr().out.splitlines()[1:] == ["  and from there on: 'abcdefghijkl'..."]


def test_the_prompt_may_come_from_a_file_or_standard_input(
    server: FakeServer, tmp_path: Path, type_in: Callable[[str], None]
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("from a file")
    explain(server, "--file", str(path))
    type_in("from a pipe")
    explain(server)
    asked = [body["prompt"] for name, body, _ in server.requests if name == "/tokenize"]
    assert asked == ["from a file", "from a pipe"]


def test_a_file_with_messages_is_a_chat_and_other_json_is_text(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": 1}, "cache_salt": "s"}
    path.write_text(json.dumps(chat, indent=1))
    assert explain(server, "--file", str(path)) == 0
    assert server.requests[0][:2] == ("/tokenize", chat)
    assert server.requests[1][1]["cache_salt"] == "s"
    assert explain(server, "--file", str(path), "--cache-salt", "mine") == 0
    salts = [body["cache_salt"] for name, body, _ in server.requests if name == "/cache/explain"]
    assert salts == ["s", "mine"]
    for text in ('[{"role": "user", "content": "Hi"}]', '"messages"', '{"messages": '):
        server.requests.clear()
        path.write_text(text)
        explain(server, "--file", str(path))
        assert server.requests[0][1] == {"prompt": text}


def test_a_file_of_several_requests_is_explained_line_by_line(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "cache_salt": "hers", "temperature": 0}
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "of a batch"}}
    lines = [{"prompt": LETTERS}, chat, {"prompt": [97, 98]}, {"prompt_token_ids": [99]}, batch]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    server.responses["/cache/explain"] = lambda body: {"text": f"{len(body['prompt'])}!", "cached_tokens": 0}
    assert explain(server, "--file", str(path)) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]
    n_chat = len(json.dumps(chat["messages"]))
    assert shown == ["line 1: 26!", f"line 3: {n_chat}!", "line 5: 2!", "line 7: 1!", "line 9: 10!"]
    explained = [body for name, body, _ in server.requests if name == "/cache/explain"]
    assert [body["cache_salt"] for body in explained] == [None, "hers", None, None, None]
    assert [body["prompt"] for body in explained[2:4]] == [[97, 98], [99]]
    path.write_text(json.dumps(chat) + "\n" + json.dumps(chat)[:-3])
    assert explain(server, "--file", str(path)) == 1
    assert f"line 2 of {path} is no request" in error_line(capsys)
    server.responses["/tokenize"] = lambda body: {"tokens": [1]} if "messages" in body else {"error": "no"}
    path.write_text(json.dumps(chat) + "\n" + json.dumps({"prompt": "a"}))
    assert explain(server, "--file", str(path)) == 1
    assert "error: line 2: " in error_line(capsys)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"system": "Be kind.", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}], "messages": [None]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "cache_salt": "s"}),
        ("/v1/responses", {"instructions": "Be kind.", "input": "Hi"}),
    ],
)
def test_bodies_of_messages_and_responses_are_explained_as_the_server_reads_them(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, body: dict[str, object]
) -> None:
    server.responses[f"/cache/explain?path={path}&return_token_ids=true"] = lambda _: {
        "text": "as it is read",
        "cached_tokens": 1,
        "prompt_token_ids": [97, 98],
    }
    server.responses["/model_info"] = lambda _: {"is_generation": True}
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(body, indent=1))
    assert explain(server, "--file", str(file)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "as it is read",
        "  up to token 1: 'a'",
        "  and from there on: 'b'",
    ]
    assert [sent for name, sent, _ in server.requests if name.startswith("/cache/explain")] == [body]
    server.requests.clear()
    file.write_text(json.dumps({"prompt": [97]}) + "\n" + json.dumps({"url": path, "body": body}))
    assert explain(server, "--file", str(file), "--cache-salt", "mine") == 0
    assert "line 2: as it is read" in capsys.readouterr().out.splitlines()
    assert {**body, "cache_salt": "mine"} in [asked for _, asked, _ in server.requests]


def test_each_prompt_of_a_request_is_explained(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.responses["/cache/explain"] = lambda body: {"text": f"{len(body['prompt'])}!", "cached_tokens": 0}
    file = tmp_path / "requests.jsonl"
    file.write_text("\ufeff" + json.dumps({"prompt": ["abc", "de"]}) + "\n" + json.dumps({"text": ["a"]}), "utf-8")
    assert explain(server, "--file", str(file)) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]
    assert shown == ["line 1: prompt 1: 3!", "line 1: prompt 2: 2!", "line 2: 1!"]


def test_one_request_has_no_line_number(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"prompt": LETTERS, "max_tokens": 5}) + "\n")
    assert explain(server, "--file", str(path)) == 0
    assert capsys.readouterr().out.startswith("16 of 26 are cached.\n")


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_errors_are_one_line(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(server, "--file", str(tmp_path / "none")) == 1
    assert "--file" in error_line(capsys)
    assert main(["explain", "text", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9/tokenize" in error_line(capsys)
    assert main(["explain", "text", "--base-url", "localhost"]) == 1
    assert "'localhost'" in error_line(capsys)
    server.responses["/cache/explain"] = lambda _: {"error": {"message": "no such path"}}
    server.status = 404
    assert explain(server, LETTERS) == 1
    assert "/cache/explain answered 404: no such path" in error_line(capsys)
    server.status = 200
    server.responses["/tokenize"] = lambda _: b"[1]"
    assert explain(server, LETTERS) == 1
    assert "/tokenize did not answer with a JSON object" in error_line(capsys)


@pytest.mark.parametrize(
    ("line", "prompts"),
    [
        ({"input": LETTERS}, [LETTERS]),
        ({"input": ["ab", "cd"], "encoding_format": "float"}, ["ab", "cd"]),
        ({"input": [97, 98]}, [[97, 98]]),
        ({"url": "/v1/embeddings", "body": {"input": LETTERS}}, [LETTERS]),
    ],
)
def test_inputs_of_embeddings_are_prompts(
    server: FakeServer, tmp_path: Path, line: dict[str, Any], prompts: list[str | list[int]]
) -> None:
    """A single text is for embeddings if the server makes them."""
    server.responses["/model_info"] = lambda _: {"is_generation": False}
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(line))
    assert explain(server, "--file", str(path)) == 0
    explained = [body["prompt"] for name, body, _ in server.requests if name == "/cache/explain"]
    assert explained == [list(map(ord, one)) if isinstance(one, str) else one for one in prompts]


def test_the_model_and_the_salt_of_a_request_are_asked_for(server: FakeServer, tmp_path: Path) -> None:
    """Adapters are models, and a salt has pages of its own."""
    path = tmp_path / "requests.jsonl"
    lines = [
        {"prompt": LETTERS, "model": "sql", "cache_salt": "hers"},
        {"prompt": [97, 98], "model": "sql", "cache_salt": "hers"},
        {"messages": [{"role": "user", "content": "Hi"}], "model": "sql", "cache_salt": "hers"},
        {"text": LETTERS, "lora_path": "sql", "cache_salt": "hers"},
        {"prompt": LETTERS},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert explain(server, "--file", str(path)) == 0
    explained = [body for name, body, _ in server.requests if name == "/cache/explain"]
    assert [(body.get("model"), body["cache_salt"]) for body in explained] == [("sql", "hers")] * 4 + [(None, None)]


def test_flags_say_model_and_salt_for_all_requests(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [
        {"prompt": LETTERS, "model": "sql", "cache_salt": "hers"},
        {"text": LETTERS, "lora_path": "sql"},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--model", "law", "--cache-salt", "his")
    assert explain(server, "--file", str(path), *flags) == explain(server, LETTERS, *flags) == 0
    explained = [body for name, body, _ in server.requests if name == "/cache/explain"]
    assert [(body["model"], body["cache_salt"]) for body in explained] == [("law", "his")] * 4
