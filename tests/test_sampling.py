"""``SamplingParams`` as callers in Python make them."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from radixkv.sampling import SamplingParams


def test_one_stop_string_is_one_stop_string() -> None:
    assert SamplingParams(stop="zpqy").stop == ("zpqy",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[7]).stop_token_ids == (7,)


def test_none_asks_for_nothing_as_in_other_engines() -> None:
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
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": None}, "top_k is None"),
        ({"stop": [1]}, r"stop is \[1\]"),
        ({"stop": ["a"] * 5}, "stop has 5 strings"),
        ({"stop": [""]}, "0 characters"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids is \['a'\]"),
    ],
)
def test_a_wrong_value_names_its_field(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**settings)
    assert caught.value.param in settings
