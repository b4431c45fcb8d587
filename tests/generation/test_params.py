"""Sampling parameters of a request, and the limits that its edge and the runtime check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.generation.chat_rendering import render_chat
from radixkv.generation.models import GenerationModel
from radixkv.generation.params import (
    check_sampling,
    clamp_max_tokens,
    default_sampling_params,
    request_sampling_params,
)
from radixkv.runtime.intake import Intake
from radixkv.text.chat_template import ChatTemplate
from radixkv.tree.marks import Marks
from radixkv.wire.messages import Ready, Submit, pack_tokens, unpack_tokens
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.request_limits import check_cache_salt
from radixkv.wire.sampling import SamplingParams

READY = Ready(6, 400, 1000, 16, 2, 8, 512, "cpu", "float32")
"""A pool of 32 tokens, for a model with a longer context."""
DEFAULTS = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 20}
MODEL = GenerationModel(ready=READY, tokenizer=None, default_sampling=DEFAULTS)


def test_fields_of_a_request_go_before_the_checkpoints_defaults() -> None:
    fields = {"top_k": 3, "stop": None, "n": 2, "stream": True, "logprobs": None}
    found = request_sampling_params(fields, None, MODEL)
    assert found == SamplingParams(temperature=0.5, top_k=3, n=2, max_tokens=None)
    assert default_sampling_params(DEFAULTS) == SamplingParams(temperature=0.5, top_k=7, max_tokens=20)
    assert default_sampling_params({}) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "seed"), [(None, None), (-1, None), (5, 5), (-2, (1 << 63) - 2), (1 << 63, 0), (-(1 << 63), 0)]
)
def test_any_integer_is_a_seed(given: int | None, seed: int | None) -> None:
    assert request_sampling_params({"seed": given}, 1, MODEL).seed == seed


@pytest.mark.parametrize(
    ("requested", "field", "n_prompt", "max_tokens"),
    [(5, "max_tokens", 28, 5), (30, "max_tokens", 2, 20), (None, None, 3, 20), (16, None, 30, 3)],
)
def test_the_answer_is_clamped_to_the_checkpoints_limit_and_the_room(
    requested: int | None, field: str | None, n_prompt: int, max_tokens: int
) -> None:
    sampling = SamplingParams(max_tokens=requested)
    assert clamp_max_tokens(sampling, MODEL, n_prompt, field, "prompt").max_tokens == max_tokens


def submit(ids: list[int], salt: str = "", **sampling: Any) -> Submit:
    return Submit("a", pack_tokens(ids), SamplingParams(**sampling), CacheNamespace(cache_salt=salt))


@pytest.mark.parametrize(
    ("at_the_edge", "in_the_runtime", "param"),
    [
        (lambda: MODEL.encode_ids([1, 400]), submit([1, 400]), "prompt"),
        (lambda: MODEL.encode_ids([1, -3]), submit([1, -3]), "prompt"),
        (
            lambda: check_sampling(SamplingParams(stop_token_ids=(5, 400)), MODEL),
            submit([1], stop_token_ids=(5, 400)),
            "stop_token_ids",
        ),
        (
            lambda: check_sampling(SamplingParams(logit_bias={-1: 1.0}), MODEL),
            submit([1], logit_bias={-1: 1.0}),
            "logit_bias",
        ),
        (lambda: check_cache_salt("é" * 65), submit([1], salt="é" * 65), "cache_salt"),
        (
            lambda: clamp_max_tokens(SamplingParams(max_tokens=30), MODEL, 4, "max_tokens", "prompt"),
            submit([1, 2, 3, 4], max_tokens=30),
            "max_tokens",
        ),
        (
            lambda: clamp_max_tokens(SamplingParams(max_tokens=None), MODEL, 33, None, "prompt"),
            submit([1] * 33, max_tokens=None),
            "prompt",
        ),
    ],
    ids=["id", "negative id", "stop id", "bias", "salt", "length", "prompt"],
)
def test_the_edge_and_the_runtime_refuse_with_the_same_error(
    at_the_edge: Callable[[], object], in_the_runtime: Submit, param: str
) -> None:
    with pytest.raises(InvalidRequest) as edge:
        at_the_edge()
    with pytest.raises(InvalidRequest) as runtime:
        Intake(READY, marks=Marks()).make_choices(in_the_runtime)
    assert edge.value.param == runtime.value.param == param
    assert type(edge.value) is type(runtime.value)
    assert str(runtime.value) == str(edge.value), "with the reason why the context is short"


@pytest.mark.parametrize("ids", [["a"], [1.5], [1 << 40]])
def test_what_no_int32_can_hold_is_no_prompt(ids: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="int32"):
        MODEL.encode_ids(ids)


def test_token_ids_are_packed() -> None:
    assert unpack_tokens(MODEL.encode_ids([0, 399])) == [0, 399]


def test_what_needs_a_tokenizer_or_a_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="stop needs a tokenizer") as error:
        request_sampling_params({"stop": "x"}, 1, MODEL)
    assert error.value.param == "stop"
    with pytest.raises(InvalidRequest, match="no chat template"):
        render_chat([{"role": "user", "content": "x"}], MODEL)


@pytest.mark.parametrize("variables", [3, {"messages": []}, {"continue_final_message": True}])
def test_template_variables_cannot_replace_what_the_template_is_given(variables: Any) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ mood }}", {}, "the test")
    with_template = GenerationModel(ready=READY, tokenizer=None, chat_template=template)
    message = {"role": "user", "content": "x"}
    assert render_chat([message], with_template, variables={"mood": "!"}) == "x!"
    with pytest.raises(InvalidRequest) as error:
        render_chat([message], with_template, variables=variables)
    assert error.value.param == "chat_template_kwargs"
