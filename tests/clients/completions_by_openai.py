"""Tests of ``/v1/models`` and ``/v1/completions`` with the installed major version of the openai package."""

from __future__ import annotations

import os
import time

import openai
import pytest
from openai import OpenAI

PROMPT = "Question: what is 2 + 2?\nAnswer:"
SHARED = "The rain in Spain stays mainly in the plain. " * 20


@pytest.fixture(scope="module")
def client() -> OpenAI:
    return OpenAI(base_url=os.environ["SERVER"] + "/v1", api_key=os.environ["KEY"], max_retries=0, timeout=60)


def test_the_intended_major_version_is_installed() -> None:
    assert os.environ["CLIENT"] == f"openai-{openai.__version__.split('.')[0]}"


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("embedded", "model", "radixkv")
    assert client.models.retrieve("embedded") == model


def test_a_text_a_list_and_token_ids(client: OpenAI) -> None:
    settings = {"model": "embedded", "max_tokens": 8, "temperature": 0}
    one = client.completions.create(prompt=PROMPT, extra_body={"return_token_ids": True}, **settings)
    (choice,) = one.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert one.usage.completion_tokens == 8
    two = client.completions.create(prompt=[PROMPT, "Hello"], **settings)
    assert [c.index for c in two.choices] == [0, 1]
    assert two.choices[0].text == choice.text
    ids = choice.model_extra["prompt_token_ids"]
    assert client.completions.create(prompt=ids, **settings).choices[0].text == choice.text
    assert client.completions.create(prompt=[ids, ids], **settings).choices[1].text == choice.text


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    settings = {"model": "embedded", "prompt": PROMPT, "max_tokens": 12, "seed": 3}
    whole = client.completions.create(**settings)
    chunks = list(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {last.id}


def test_several_choices_and_seeds(client: OpenAI) -> None:
    settings = {"model": "embedded", "prompt": PROMPT, "max_tokens": 8, "n": 3}
    first = client.completions.create(**settings, seed=1)
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in client.completions.create(**settings, seed=1).choices] == texts
    assert [choice.text for choice in client.completions.create(**settings, seed=2).choices] != texts


def test_logprobs_and_echo(client: OpenAI) -> None:
    """lm-eval scores prompts with such requests."""
    reply = client.completions.create(
        model="embedded", prompt=PROMPT, max_tokens=1, temperature=0, logprobs=2, echo=True
    )
    (choice,) = reply.choices
    assert choice.text.startswith(PROMPT)
    logprobs = choice.logprobs
    n_tokens = reply.usage.prompt_tokens + 1
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == n_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in logprobs.token_logprobs[1:])
    assert all(len(top) >= 2 for top in logprobs.top_logprobs[1:])
    assert logprobs.top_logprobs[-1][logprobs.tokens[-1]] == max(logprobs.top_logprobs[-1].values())
    assert [choice.text[at] == token[0] for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]


def test_stop(client: OpenAI) -> None:
    settings = {"model": "embedded", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**settings).choices[0].text
    stop = next(text[i : i + 3] for i in range(4, len(text) - 3) if "�" not in text[i : i + 3])
    (choice,) = client.completions.create(**settings, stop=[stop]).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_cached_tokens(client: OpenAI) -> None:
    def cached(prompt: str) -> int:
        reply = client.completions.create(model="embedded", prompt=prompt, max_tokens=1)
        return reply.usage.prompt_tokens_details.cached_tokens

    prompt = f"{time.time_ns()} {SHARED}"
    assert cached(prompt) == 0
    assert cached(prompt) > 100


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logprobs": -1}, "logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"100000000": 1}}, "logit_bias"),
        ({"suffix": "of a text"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"stream": True, "extra_body": {"use_beam_search": True}}, "use_beam_search"),
    ],
)
def test_a_bad_value_is_a_bad_request_that_names_it(client: OpenAI, settings: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "embedded", "prompt": PROMPT, **settings})
    assert caught.value.param == param
    assert param in caught.value.body["message"]


def test_too_long_a_prompt_has_the_code_that_tools_look_for(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="embedded", prompt="x " * 100_000)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_and_a_wrong_key(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-another").models.list()


def test_a_full_queue_is_an_error_that_the_client_retries_after_the_servers_delay(client: OpenAI) -> None:
    settings = {"model": "embedded", "prompt": [PROMPT] * 64, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**settings)
    assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
    assert caught.value.response.headers["retry-after"] == "1"
    begun = time.monotonic()
    with pytest.raises(openai.InternalServerError):
        client.with_options(max_retries=1).completions.create(**settings)
    assert time.monotonic() - begun >= 1
