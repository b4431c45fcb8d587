"""On every API, prompt and answer together read as their tokens do: with the answer's first space, for example."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import decoders

from radixkv.frontend.served_model import ServedModel
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from support.running_site import running_site
from support.scripted_runtime import Site
from support.site_requests import events, post
from support.small_tokenizers import sentencepiece

LAST_CONTENT = ChatTemplate("{{ messages[-1].content }}", {}, "the test")
DECODERS = {
    "strip": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
}
ANSWER = " cats"
ASKED = [{"role": "user", "content": "the"}]


@pytest.fixture(scope="module", params=DECODERS)
def spaced(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer like Llama 2's, which puts a space before a text and takes it off when it decodes."""
    return Tokenizer(sentencepiece(decoders.Sequence(DECODERS[request.param])))


@pytest.fixture(scope="module")
def site(served_model: ServedModel, spaced: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    model = replace(served_model, tokenizer=spaced, chat_template=LAST_CONTENT, max_token_characters=None)
    with running_site(model, tmp_path_factory.mktemp("s")) as site:
        yield site


@pytest.fixture
def cats(site: Site, spaced: Tokenizer) -> None:
    """Every choice says `` cats`` after its prompt."""
    site.loop.answers = [unpack_tokens(spaced.encode("cats"))] * 3
    assert spaced.decode(site.loop.answers[0]) == ANSWER.strip()


@pytest.mark.usefixtures("cats")
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"n": 3, "logprobs": 0}, {"echo": True, "logprobs": 0}], ids=str
)
def test_a_completion_keeps_its_first_space(
    site: Site, spaced: Tokenizer, as_ids: bool, more: dict[str, Any]
) -> None:
    n_tokens = len(site.loop.answers[0])
    prompt = unpack_tokens(spaced.encode("the")) if as_ids else "the"
    body = {"prompt": prompt, "max_tokens": n_tokens, **more}
    choices = post(site, "/v1/completions", **body)["choices"]
    text = "the" * bool(more.get("echo")) + ANSWER
    assert [choice["text"] for choice in choices] == [text] * more.get("n", 1)
    pieces = [event["choices"][0] for event in events(site, "/v1/completions", **body) if event["choices"]]
    for choice in choices:
        assert "".join(piece["text"] for piece in pieces if piece["index"] == choice["index"]) == text
        if "logprobs" in more:
            tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert "".join(tokens[-n_tokens:]) == ANSWER
            assert offsets[-n_tokens:] == [
                text.index(" ") + len("".join(tokens[-n_tokens:][:i])) for i in range(n_tokens)
            ]


@pytest.mark.usefixtures("cats")
def test_a_stop_string_may_begin_with_the_first_space(site: Site) -> None:
    choice = post(site, "/v1/completions", prompt="the", stop=" cat", max_tokens=5)["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("", " cat")


@pytest.mark.usefixtures("cats")
@pytest.mark.parametrize("prefill", [False, True])
def test_the_answer_of_a_chat_keeps_its_first_space(site: Site, prefill: bool) -> None:
    n = len(site.loop.answers[0])
    messages = [*ASKED, {"role": "assistant", "content": "the"}] if prefill else ASKED
    body: dict[str, Any] = {"messages": messages, "max_tokens": n}
    chat = body | ({"continue_final_message": True, "add_generation_prompt": False} if prefill else {})
    assert post(site, "/v1/chat/completions", **chat)["choices"][0]["message"]["content"] == ANSWER
    chunks = events(site, "/v1/chat/completions", **chat)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ANSWER
    message = {**body, "model": "echo"}
    assert post(site, "/v1/messages", **message)["content"][0]["text"] == ANSWER
    deltas = [event.get("delta", {}).get("text") or "" for event in events(site, "/v1/messages", **message)]
    assert "".join(deltas) == ANSWER


@pytest.mark.usefixtures("cats")
def test_a_response_keeps_its_first_space(site: Site) -> None:
    body = {"model": "echo", "input": "the", "max_output_tokens": len(site.loop.answers[0])}
    assert post(site, "/v1/responses", **body)["output"][-1]["content"][0]["text"] == ANSWER
    deltas = [
        event["delta"] for event in events(site, "/v1/responses", **body) if "output_text.delta" in event["type"]
    ]
    assert "".join(deltas) == ANSWER


@pytest.mark.usefixtures("cats")
def test_generate_keeps_the_first_space(site: Site) -> None:
    body = {"text": "the", "sampling_params": {"max_new_tokens": len(site.loop.answers[0])}}
    assert post(site, "/generate", **body)["text"] == ANSWER
    assert events(site, "/generate", **body)[-1]["text"] == ANSWER


def test_a_text_that_the_answer_begins_has_no_first_space(site: Site, spaced: Tokenizer) -> None:
    nothing = spaced.vocab_size + 1  # a token of the model without any text
    site.loop.answers = [unpack_tokens(spaced.encode("cat"))]
    body = {"prompt": [nothing], "max_tokens": len(site.loop.answers[0])}
    assert post(site, "/v1/completions", **body)["choices"][0]["text"] == "cat"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_completes_the_character_that_its_prompt_begins(
    site: Site, spaced: Tokenizer, echo: bool, stream: bool
) -> None:
    """The choices end as é, as è, and as two characters that are none."""
    x, begun = unpack_tokens(spaced.encode("cat")), byte_token(spaced, "é".encode()[0])
    site.loop.answers = [[byte_token(spaced, byte)] for byte in (*b"\xa9\xa8", "é".encode()[0])]
    body = {"prompt": [*x, begun], "max_tokens": 1, "n": 3, "echo": echo}
    if stream:
        texts = ["", "", ""]
        for event in events(site, "/v1/completions", **body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        texts = [choice["text"] for choice in post(site, "/v1/completions", **body)["choices"]]
    site.loop.answers = []
    assert texts == (["caté", "catè", "cat\ufffd\ufffd"] if echo else ["é", "è", "\ufffd"])
    empty = post(site, "/v1/completions", **{**body, "n": 1, "echo": True, "max_tokens": 0})
    assert empty["choices"][0]["text"] == "cat\ufffd"


def byte_token(spaced: Tokenizer, byte: int) -> int:
    """Returns the token of a single byte."""
    name = f"<0x{byte:02X}>"
    return next(token for token in range(spaced.vocab_size) if spaced.token(token) == name)
