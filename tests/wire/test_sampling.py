"""``SamplingParams`` made by callers in Python."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.settings.compat import Place, refusals
from radixkv.wire.sampling import SamplingParams


def test_one_stop_string_is_one_stop_string() -> None:
    assert SamplingParams(stop="zpqy").stop == ("zpqy",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[7]).stop_token_ids == (7,)


def test_seed_minus_one_means_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    for seed in (-2, -1.0):
        with pytest.raises(InvalidRequest, match=f"seed is {seed}; it must be"):
            SamplingParams(seed=seed)


def test_numpy_scalars_are_accepted() -> None:
    given = SamplingParams(
        max_tokens=np.int64(5),
        top_k=np.int32(3),
        seed=np.int64(-1),
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        presence_penalty=np.int64(1),
        stop_token_ids=[np.int64(7), 8],
        logit_bias={np.int64(4): np.float32(1.5)},
    )
    assert given == SamplingParams(
        max_tokens=5,
        top_k=3,
        seed=None,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1,
        stop_token_ids=[7, 8],
        logit_bias={4: 1.5},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SamplingParams) == given
    assert SamplingParams(stop_token_ids=np.int64(7)).stop_token_ids == (7,)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": np.float32(5)},
        {"max_tokens": np.True_},
        {"max_tokens": np.int64(0)},
        {"temperature": np.float32("nan")},
        {"temperature": Fraction(10**400)},
        {"presence_penalty": Fraction(-(10**400))},
        {"top_k": Fraction(10**400)},
        {"stop_token_ids": [Fraction(10**400)]},
        {"logit_bias": {4: Fraction(10**400)}},
        {"seed": np.array([1, 2])},
        {"temperature": np.True_},
        {"temperature": np.array([0.5])},
        {"n": np.array([1])},
        {"stop_token_ids": [np.float32(7)]},
        {"logit_bias": {np.float32(4): 1.0}},
    ],
)
def test_invalid_numpy_values_and_fractions_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(InvalidRequest, match=f"{name} is .*; it must be") as caught:
        SamplingParams(**settings)
    assert caught.value.param == name


def test_none_means_the_default_as_in_other_engines() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": True}, "seed is True"),
        ({"max_tokens": "5"}, "max_tokens is '5'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": "x"}, "temperature is 'x'"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0.* 1"),
        ({"top_p": 1.5}, "top_p is 1.5.* 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.* 100"),
        ({"min_p": 1.5}, "min_p is 1.5.* 1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": None}, "top_k is None"),
        ({"stop": [1]}, r"stop is \[1\]"),
        ({"stop": ["a"] * 17}, "stop has 17 strings"),
        ({"stop": [""]}, "0 characters"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids is \['a'\]"),
    ],
)
def test_a_wrong_value_names_its_field(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**settings)
    assert caught.value.param in settings


def test_settings_of_other_engines_without_effect_are_accepted() -> None:
    no_op: dict[str, Any] = {"best_of": 1, "detokenize": True, "bad_words": [], "guided_decoding": None}
    assert SamplingParams(**no_op, temperature=0.5) == SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"best_of": 2}, "best_of.* n\\b"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.'whitespace_pattern'",
        ),
        ({"bad_words": ["a"], "n": 2}, r"bad_words \['a'\] .*logit_bias"),
        ({"best_of": True}, "best_of"),
        ({"temprature": 0.0}, r"temprature.* temperature"),
        ({"nothing": None, "more": 3}, "more, nothing"),
    ],
)
def test_an_unknown_setting_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFeature, match=message):
        SamplingParams(**settings)


def test_names_of_other_engines_are_taken() -> None:
    given = SamplingParams(max_new_tokens=5, min_new_tokens=2, sampling_seed=7, no_stop_trim=True, stop="a")
    assert given == SamplingParams(max_tokens=5, min_tokens=2, seed=7, include_stop_str_in_output=True, stop="a")
    assert SamplingParams(max_completion_tokens=None) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize(
    ("settings", "message", "param"),
    [
        ({"max_new_tokens": 0}, "^max_new_tokens is 0", "max_new_tokens"),
        ({"sampling_seed": 1.5}, "^sampling_seed is 1.5", "sampling_seed"),
        ({"max_new_tokens": 4, "min_tokens": 5}, "min_tokens is 5.* max_new_tokens, 4", "min_tokens"),
        ({"max_new_tokens": 4, "max_tokens": 4}, "max_tokens and max_new_tokens", None),
        ({"max_new_tokens": 4, "max_completion_tokens": 4}, "max_new_tokens and max_completion_tokens", None),
    ],
)
def test_errors_name_the_alias_that_was_given(settings: dict[str, Any], message: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**settings)
    assert caught.value.param == param


@pytest.mark.parametrize("name", sorted(refusals(Place.SAMPLING)))
def test_a_setting_of_other_engines_is_not_mistaken_for_a_typo(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=rf"{name} (?!.*did you mean)"):
        SamplingParams(**{name: object()})


def test_settings_without_names_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature=0.8, top_p=0.95"):
        SamplingParams(0.8, 0.95)  # type: ignore[misc]


def test_a_float_equals_an_int_value_without_effect() -> None:
    SamplingParams(best_of=1.0)
    with pytest.raises(UnsupportedFeature, match="best_of"):
        SamplingParams(best_of=True)
