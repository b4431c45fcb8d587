"""A server with grammars whose model has random weights: answers match, and calls in a history are cached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from support.live import LIMIT_S, LiveServer, complaints, serving
from support.sensitive_checkpoint import END_HEADER, END_OF_TEXT, END_OF_TURN, START_HEADER

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    f"{START_HEADER}{{{{ message.role }}}}{END_HEADER}\n\n{{{{ message.content }}}}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson(separators=(',', ':')) }}}\n</tool_call>"
    f"{{% endfor %}}{END_OF_TURN}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{START_HEADER}assistant{END_HEADER}\n\n{{% endif %}}"
)
CITY = {"type": "string", "enum": ["Constantinople, the city of the world's desire"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather_forecast",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "degrees": {"type": "integer", "minimum": 0}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(sensitive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("s")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ("--chat-template", str(folder / "template.jinja"), "--grammar-backend", "xgrammar")
    with serving(sensitive, folder / "errors", *flags) as live:
        yield live


@pytest.mark.nightly
def test_an_answer_matches_its_schema(server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    body = {"response_format": form, "max_tokens": 60, "temperature": 0}
    reply = server.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "The weather?"}], **body}
    )
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    if choice["finish_reason"] == "stop":
        answer = json.loads(choice["message"]["content"])
        assert len(answer["city"]) <= 8
        assert answer["degrees"] >= 0
    else:
        assert choice["message"]["content"].startswith('{"city": "')


def unwanted(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns a bias against what random weights like: white space around JSON, another end than the template's."""
    texts = {token: tokenizer.token_text(token) for token in range(tokenizer.vocab_size)}
    biased = [
        token
        for token, text in texts.items()
        if text == END_OF_TEXT or (text.split() != [text] and not text.strip(' \t\r\n{}[]":,'))
    ]
    return dict.fromkeys(map(str, biased), -100)


def doctor(server: LiveServer) -> str:
    command = [sys.executable, "-m", "radixkv.cli", "doctor", "--base-url", server.base_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    return done.stdout


@pytest.mark.nightly
def test_a_call_is_cached_with_the_tokens_of_the_model(server: LiveServer, sensitive: Path) -> None:
    """The model wrote it with tokens that the tokenizer would not choose."""
    tokenizer = Tokenizer.load(sensitive)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it warm there?"}]

    def turn(**changes: Any) -> Any:
        body = {"messages": messages, "tools": [TOOL], "return_token_ids": True, "seed": 1, **changes}
        reply = server.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    bias = unwanted(tokenizer)
    first = turn(tool_choice="required", parallel_tool_calls=False, logit_bias=bias)
    choice = first["choices"][0]
    assert choice["finish_reason"] == "tool_calls", choice
    written = first["prompt_token_ids"] + choice["token_ids"]
    text = tokenizer.decode(written, skip_special_tokens=False)
    (call,) = choice["message"]["tool_calls"]
    messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "24 degrees"}]

    second = turn(max_tokens=4)
    assert second["prompt_token_ids"][: len(written)] == written
    assert unpack_tokens(tokenizer.encode(text, adds_special_tokens=False)) != written, "the tokenizer would differ"
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (len(written) - 1) // 16 * 16 > len(first["prompt_token_ids"]), "all whole pages"
    report = server.http.get("/cache/doctor").json()["history_answers"]
    assert (report["same"], report["otherwise"]) == (1, 0)
    other = turn(max_tokens=4, cache_salt="other")
    assert other["prompt_token_ids"] != second["prompt_token_ids"], "the tokenizer encodes the call otherwise"
    assert "answers in the history" not in doctor(server)

    messages[1] = {**choice["message"], "content": "I look."}
    turn(max_tokens=4)
    assert "1 of 2 answers in the history" in doctor(server)
