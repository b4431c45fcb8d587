"""The settings of speculative decoding, as JSON and as a mapping."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.errors import ConfigError, RadixKVError, UnsupportedFeature
from radixkv.settings.speculative import SpeculativeConfig, as_speculative


def test_vllms_fields_as_json_and_as_a_mapping() -> None:
    expected = SpeculativeConfig("ngram", 5, prompt_lookup_max=4, prompt_lookup_min=2)
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    assert as_speculative(given) == as_speculative(text) == as_speculative(expected) == expected
    assert as_speculative(None) is None


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"method": "eagle"}, UnsupportedFeature, "method 'eagle'.*use ngram"),
        ({"method": "tree"}, UnsupportedFeature, "method 'tree'.*use ngram"),
        ({"method": 3}, UnsupportedFeature, "method 3"),
        ({"num_speculative_tokens": 5}, ConfigError, "no method"),
        ({"method": "ngram", "model": "draft"}, ConfigError, "'model' is no field"),
        ({"method": "ngram", "num_speculative_tokens": 0}, ConfigError, "num_speculative_tokens 0"),
        ({"method": "ngram", "num_speculative_tokens": 33}, ConfigError, "num_speculative_tokens 33"),
        ({"method": "ngram", "num_speculative_tokens": 1.5}, ConfigError, "num_speculative_tokens 1.5"),
        ({"method": "ngram", "prompt_lookup_min": 9}, ConfigError, "prompt_lookup_min 9 is above"),
        ({"method": "ngram", "prompt_lookup_min": 0}, ConfigError, "prompt_lookup_min 0"),
        ("[]", ConfigError, "not a JSON object"),
        ("{", ConfigError, "not a JSON object"),
        (True, ConfigError, "no mapping"),
    ],
)
def test_others_are_refused_with_what_to_do(value: Any, error: type[RadixKVError], message: str) -> None:
    with pytest.raises(error, match=message):
        as_speculative(value)
