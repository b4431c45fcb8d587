"""SGLang's ``/generate``, with the fields that its clients read."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from functools import partial
from typing import Any

import pytest

from radixkv.frontend.api.sglang.schema import parse_generate
from radixkv.frontend.api.sglang.translation import generate_prompts
from radixkv.frontend.served_model import ServedModel
from support import site_requests
from support.scripted_runtime import EOS, FAILS_AFTER_THREE, FAILS_AT_ONCE, MAX_MODEL_LEN, VOCAB_SIZE, Site
from support.site_requests import events, post, post_bytes

generate = partial(post, path="/generate")
stream = partial(events, path="/generate")

SECRET = "do-not-repeat-me"


def check_refusal(reply: Any, param: str | None, code: str = "invalid_request") -> None:
    assert SECRET not in reply.text
    site_requests.check_refusal(reply, param, code)


def canary(site: Site) -> None:
    found = generate(site, text="hello", sampling_params={"max_new_tokens": 7, "temperature": 0})
    assert (found["text"], found["meta_info"]["completion_tokens"]) == ("hellohe", 7)


def test_one_text_gives_one_object(site: Site) -> None:
    found = generate(site, text="hello", sampling_params={"max_new_tokens": 7, "temperature": 0})
    meta = found.pop("meta_info")
    assert found == {"text": "hellohe", "output_ids": [ord_of(letter) for letter in "hellohe"]}
    assert isinstance(meta.pop("id"), str)
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "finish_reason": {"type": "length", "length": 7},
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "cached_tokens": 2,
    }


def ord_of(letter: str) -> int:
    """Returns a letter's token: the scripted tokenizer numbers the byte-level alphabet from '!' on."""
    return ord(letter) - ord("!")


def test_a_list_gives_a_list_even_of_one(site: Site) -> None:
    assert [one["text"] for one in generate(site, text=["ab"], sampling_params={"max_new_tokens": 2})] == ["ab"]
    found = generate(site, text=["ab", "cd", "e"], sampling_params={"max_new_tokens": 3})
    assert [one["text"] for one in found] == ["aba", "cdc", "eee"]
    found = generate(site, input_ids=[[1, 2], [3]], sampling_params={"max_new_tokens": 2})
    assert [one["output_ids"] for one in found] == [[1, 2], [3, 3]]
    assert generate(site, input_ids=[1, 2], sampling_params={"max_new_tokens": 2})["output_ids"] == [1, 2]


def test_each_prompt_may_have_its_own_settings(site: Site) -> None:
    found = generate(
        site,
        text=["ab", "cd"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 3, "temperature": 0.5}],
        rid=["first", "second"],
        return_logprob=[False, True],
        top_logprobs_num=[0, 2],
    )
    assert [one["text"] for one in found] == ["a", "cdc"]
    assert [one["meta_info"]["id"] for one in found] == ["first", "second"]
    assert "output_token_logprobs" not in found[0]["meta_info"]
    assert len(found[1]["meta_info"]["output_top_logprobs"][0]) == 2
    assert site.loop.submitted[-1].sampling.temperature == 0.5


def test_n_answers_to_each_prompt_are_a_flat_list(site: Site) -> None:
    found = generate(site, text=["abc", "de"], sampling_params={"max_new_tokens": 2, "n": 2}, rid="r")
    assert [one["text"] for one in found] == ["ab", "bc", "de", "ed"]
    assert [one["meta_info"]["id"] for one in found] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
    assert [one["text"] for one in generate(site, text="abc", sampling_params={"max_new_tokens": 2, "n": 2})] == [
        "ab",
        "bc",
    ]


def test_answers_may_share_an_id(site: Site) -> None:
    body = {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 2}, "rid": ["x", "x"]}
    assert [one["text"] for one in generate(site, **body)] == ["ab", "cd"]
    assert {(event["index"], event["text"]) for event in stream(site, **body)} >= {(0, "ab"), (1, "cd")}


def test_defaults_are_sglangs(site: Site) -> None:
    assert generate(site, text="ab")["meta_info"]["completion_tokens"] == 128
    submit = site.loop.submitted[-1]
    assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.n) == (1.0, 1.0, 1)
    assert (submit.namespace.cache_salt, submit.reads_cache, submit.priority) == ("", True, 0)
    assert generate(site, text="ab", sampling_params=None)["meta_info"]["completion_tokens"] == 128


def test_a_default_length_is_clamped_null_is_the_rest_and_a_set_one_is_refused(site: Site) -> None:
    ids = [1] * (MAX_MODEL_LEN - 4)
    assert generate(site, input_ids=ids)["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    found = generate(site, input_ids=[1] * 12, sampling_params={"max_new_tokens": None})
    assert found["meta_info"]["completion_tokens"] == MAX_MODEL_LEN - 12
    reply = site.http.post("/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 5}})
    check_refusal(reply, "max_new_tokens", "context_length_exceeded")


def test_settings_reach_the_runtime(site: Site) -> None:
    sampling = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 2.0},
        "sampling_seed": 11,
        "stop": ["x"],
        "stop_token_ids": [9],
        "no_stop_trim": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    generate(site, text="ab", sampling_params=sampling, cache_salt="t", skip_reading_prefix_cache=True, priority=3)
    submit = site.loop.submitted[-1]
    found = submit.sampling
    assert (found.max_tokens, found.min_tokens, found.temperature, found.top_p) == (9, 2, 0.5, 0.25)
    assert (found.top_k, found.min_p, found.logit_bias, found.seed) == (7, 0.125, {5: 2.0}, 11)
    assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (found.stop, found.stop_token_ids) == (("x",), (9,))
    assert (found.include_stop_str_in_output, found.ignore_eos, found.skip_special_tokens) == (True, True, False)
    assert (submit.namespace.cache_salt, submit.reads_cache, submit.priority) == ("t", False, 3)
    generate(site, text="ab", sampling_params={"max_new_tokens": 1, "seed": 12})
    assert site.loop.submitted[-1].sampling.seed == 12
    generate(site, text="ab", sampling_params={"max_new_tokens": 1, "sampling_seed": -1})
    assert site.loop.submitted[-1].sampling.seed is None


@pytest.mark.parametrize(
    ("body", "text", "finish"),
    [
        ({"text": "hello world", "sampling_params": {"stop": "wor"}}, "hello ", {"type": "stop", "matched": "wor"}),
        (
            {"text": "hello world", "sampling_params": {"stop": ["zz", "wor"], "no_stop_trim": True}},
            "hello wor",
            {"type": "stop", "matched": "wor"},
        ),
        ({"input_ids": [70, 71, EOS, 72]}, None, {"type": "stop", "matched": EOS}),
        (
            {"input_ids": [70, 71, 72], "sampling_params": {"stop_token_ids": [72]}},
            None,
            {"type": "stop", "matched": 72},
        ),
    ],
)
def test_the_finish_reason_is_reported(
    site: Site, body: dict[str, Any], text: str | None, finish: dict[str, Any]
) -> None:
    found = generate(site, **body)
    assert found["meta_info"]["finish_reason"] == finish
    if text is not None:
        assert found["text"] == text
    *_, last = stream(site, **body)
    for one in (found, last):
        del one["meta_info"]["id"], one["meta_info"]["e2e_latency"]
    assert last == found


@pytest.mark.parametrize(
    "body",
    [
        {"text": "hé😀", "sampling_params": {"max_new_tokens": 17}},
        {"text": "hello world", "sampling_params": {"max_new_tokens": 40, "stop": "o w"}},
        {"text": ["abc", "de", "f"], "sampling_params": {"max_new_tokens": 8}},
        {"text": ["abc", "de"], "sampling_params": {"max_new_tokens": 5, "n": 2}},
        {"text": ["hello world", "ab"], "sampling_params": {"max_new_tokens": 30, "n": 2, "stop": "worl"}},
        {"text": "abc", "sampling_params": {"max_new_tokens": 5}, "return_logprob": True, "top_logprobs_num": 3},
    ],
    ids=str,
)
def test_texts_of_a_stream_grow_to_the_whole_response(site: Site, body: dict[str, Any]) -> None:
    whole = generate(site, **body, rid="r")
    wholes = whole if isinstance(whole, list) else [whole]
    found = stream(site, **body, rid="r")
    assert all(("index" in event) == isinstance(whole, list) for event in found)
    for index, expected in enumerate(wholes):
        mine = [event for event in found if event.get("index", 0) == index]
        for before, after in itertools.pairwise(mine):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert before["meta_info"]["finish_reason"] is None
            assert before["meta_info"]["completion_tokens"] == len(before["output_ids"])
        last = {name: value for name, value in mine[-1].items() if name != "index"}
        for one in (last, expected):
            del one["meta_info"]["e2e_latency"]
        assert last == expected


def test_a_stream_has_several_events(site: Site) -> None:
    site.loop.step_s = 0.01
    assert len(stream(site, text="hello", sampling_params={"max_new_tokens": 12})) > 3


def test_logprobs_of_the_answer(site: Site) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    meta = generate(site, **body)["meta_info"]
    a, b = ord_of("a"), ord_of("b")
    assert meta["output_token_logprobs"] == [[-1.0, a, None], [-1.0, b, None]]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    meta = generate(site, **body, top_logprobs_num=2, return_text_in_logprobs=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.0, a, "a"], [-1.0, b, "b"]]
    assert meta["output_top_logprobs"] == [[[-0.5, b, "b"], [-1.0, a, "a"]], [[-0.5, b + 1, "c"], [-1.0, b, "b"]]]


def test_logprobs_of_the_prompt_from_any_position_on(site: Site) -> None:
    body = {"text": "abcdef", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    ids = [ord_of(letter) for letter in "abcdef"]
    for start in (0, 2, 5):
        meta = generate(site, **body, logprob_start_len=start, top_logprobs_num=1)["meta_info"]
        entries = meta["input_token_logprobs"]
        assert [entry[1] for entry in entries] == ids[start:]
        assert [entry[0] for entry in entries] == [None] + [-1.0] * (len(ids) - start - 1)
        assert meta["input_top_logprobs"][0] is None
        assert [top[0][1] for top in meta["input_top_logprobs"][1:]] == [token + 1 for token in ids[start + 1 :]]
    assert site.loop.submitted[-1].sampling.prompt_logprobs == 1
    generate(site, **{**body, "return_logprob": False}, logprob_start_len=0)
    assert site.loop.submitted[-1].sampling.prompt_logprobs is None


def test_a_failure_is_an_error_before_the_stream_and_an_event_in_it(site: Site) -> None:
    reply = site.http.post("/generate", json={"input_ids": [FAILS_AT_ONCE, 1], "stream": True})
    assert reply.status_code == 503
    assert int(reply.headers["Retry-After"]) >= 1
    site.loop.may_fail = False
    with site.http.stream("POST", "/generate", json={"input_ids": [FAILS_AFTER_THREE, 1], "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith('data: {"text"')
        site.loop.may_fail = True
        *_, error, done = filter(None, lines)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "numerical_error"
    assert done == "data: [DONE]"
    canary(site)


BAD_SAMPLING: list[tuple[str, list[Any]]] = [
    ("max_new_tokens", [-1, -5, "5", 1.5, True, 10**30]),
    ("min_new_tokens", [-1, 129, "1"]),
    ("temperature", [-0.001, 100.001, "hot", SECRET]),
    ("top_p", [0, 1.001, -0.001]),
    ("top_k", [-2, 1 << 31, 0.5]),
    ("min_p", [-0.001, 1.001]),
    ("presence_penalty", [-2.001, 2.001]),
    ("frequency_penalty", [-2.001, 2.001]),
    ("repetition_penalty", [0, 100.001]),
    ("logit_bias", [{str(VOCAB_SIZE): 1}, {"-1": 1}, {"1": 100.001}, {"1": -100.001}, {"x": 1}, {"1": "x"}, [1]]),
    ("n", [0, 65, "2"]),
    ("sampling_seed", [1 << 63, "x"]),
    ("stop", ["", ["a"] * 17, "x" * 65, 3, [SECRET, 3]]),
    ("stop_token_ids", [[VOCAB_SIZE], [-1], [1] * 65, "x", 5]),
    ("no_stop_trim", [1, "yes"]),
    ("ignore_eos", [1]),
    ("skip_special_tokens", ["no"]),
]


@pytest.mark.parametrize(("name", "values"), BAD_SAMPLING)
def test_a_wrong_sampling_value_is_refused_by_name(site: Site, name: str, values: list[Any]) -> None:
    for value in values:
        check_refusal(site.http.post("/generate", json={"text": "a", "sampling_params": {name: value}}), name)
    body = {"text": ["a", "b"], "sampling_params": [{}, {name: values[0]}]}
    check_refusal(site.http.post("/generate", json=body), name)
    canary(site)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_json_does_not_have_are_refused(site: Site, value: float) -> None:
    content = json.dumps({"text": "a", "sampling_params": {"temperature": value}})
    check_refusal(post_bytes(site, "/generate", content), None)


BAD_FIELDS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": None}, "text"),
    ({"text": 5}, "text"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", ""]}, "text"),
    ({"text": ["a", 1]}, "text"),
    ({"text": ["a"] * 65}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [VOCAB_SIZE]}, "input_ids"),
    ({"input_ids": [1.0]}, "input_ids"),
    ({"input_ids": [[1]] * 65}, "input_ids"),
    ({"text": "a", "sampling_params": []}, "sampling_params"),
    ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": "a", "sampling_params": 5}, "sampling_params"),
    ({"text": "a", "sampling_params": [5]}, "sampling_params"),
    ({"text": "a", "sampling_params": SECRET}, "sampling_params"),
    ({"text": "a", "stream": "yes"}, "stream"),
    ({"text": "a", "return_logprob": 1}, "return_logprob"),
    ({"text": "a", "return_logprob": [True, True]}, "return_logprob"),
    ({"text": "a", "return_logprob": []}, "return_logprob"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"text": "ab", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "ab", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"text": "a", "rid": ["a", "b"]}, "rid"),
    ({"text": "a", "rid": 5}, "rid"),
    ({"text": "a", "priority": "high"}, "priority"),
    ({"text": "a", "cache_salt": "é" * 65}, "cache_salt"),
    ({"text": "a", "skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache"),
]


def test_a_wrong_field_is_refused_by_name(site: Site) -> None:
    for body, param in BAD_FIELDS:
        check_refusal(site.http.post("/generate", json=body), param)
    canary(site)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_embeds", [[0.5]]),
        ("image_data", "x"),
        ("session_params", {"id": "a"}),
        ("custom_logit_processor", "x"),
        ("extra_key", "tenant"),
        ("token_ids_logprob", [1]),
        ("return_hidden_states", True),
        ("routed_dp_rank", 0),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(site: Site, name: str, value: Any) -> None:
    check_refusal(site.http.post("/generate", json={"text": "a", name: value}), name, "unsupported_feature")


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_regex", "a"), ("custom_params", {"a": 1}), ("logprobs", 0), ("spaces_between_special_tokens", False)],
)
def test_an_unsupported_sampling_feature_is_refused_by_name(site: Site, name: str, value: Any) -> None:
    reply = site.http.post("/generate", json={"text": "a", "sampling_params": {name: value}})
    check_refusal(reply, name, "unsupported_feature")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {"min_new_tokens": 200}}, "min_new_tokens is 200"),
        ({"sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}}, "min_new_tokens is 1"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num is 21"),
        ({"sampling_params": {"n": 65}}, "n is 65"),
    ],
)
def test_errors_use_the_field_names_of_sglang(site: Site, body: dict[str, Any], message: str) -> None:
    reply = site.http.post("/generate", json={"text": "a", **body})
    assert reply.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"json_schema": '{"type": "integer"}'}, "json"),
        ({"regex": "a+", "ebnf": "", "json_schema": None}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar"),
        ({"structural_tag": '{"format": {}}'}, "structural_tag"),
    ],
)
def test_a_format_of_the_answer_reaches_the_runtime(
    served_model: ServedModel, given: dict[str, Any], field: str
) -> None:
    body = json.dumps({"text": "a", "sampling_params": given}).encode()
    request, sampling = parse_generate(body, 100, {})
    (prompt,) = asyncio.run(generate_prompts(request, sampling, served_model, ""))
    wanted = prompt.prompt.sampling.structured_outputs

    assert wanted is not None
    assert wanted.kind == field
    assert getattr(wanted, field) in given.values()


@pytest.mark.parametrize(
    ("given", "name"),
    [({"json_schema": "{}", "regex": "a"}, "regex"), ({"json_schema": {}}, "json_schema"), ({"ebnf": 3}, "ebnf")],
)
def test_a_wrong_format_of_the_answer_is_refused(site: Site, given: dict[str, Any], name: str) -> None:
    check_refusal(site.http.post("/generate", json={"text": "a", "sampling_params": given}), name)


def test_a_model_that_is_not_the_served_one_is_refused(site: Site) -> None:
    """It would be answered without the adapter that the client means."""
    served = site.http.get("/v1/models").json()["data"][0]["id"]
    for name in (served, "", None):
        generate(site, text="ab", model=name)
    reply = site.http.post("/generate", json={"text": "ab", "model": "sql"})
    check_refusal(reply, "model", "unsupported_feature")
    assert "lora_path" in reply.text
