"""The settings of speculative decoding, as JSON and as a mapping."""

from __future__ import annotations

import re
from typing import Any

import pytest

from radixkv.errors import ConfigError, UnsupportedFeature
from radixkv.settings.compat import Place, SettingNames
from radixkv.settings.speculative import SpeculativeConfig, as_speculative
from support.flags import parse


def test_vllms_fields_as_json_and_as_a_mapping() -> None:
    expected = SpeculativeConfig("ngram", 5, prompt_lookup_max=4, prompt_lookup_min=2)
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    assert as_speculative(given) == as_speculative(text) == as_speculative(expected) == expected
    assert as_speculative(None) is as_speculative("off") is as_speculative("null") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "eagle"}, "method 'eagle': .*a draft head.*use tree"),
        ({"method": "eagle3"}, "method 'eagle3'.*a draft head.*use tree"),
        ({"method": "medusa"}, "method 'medusa'.*a draft head.*use tree"),
        ({"method": "mtp"}, "method 'mtp'.*a draft head.*use tree"),
        ({"method": "draft_model"}, "method 'draft_model'.*a second model.*use tree"),
        ({"method": "suffix"}, "method 'suffix'.*suffix trees.*use tree"),
        ({"method": "trie"}, "method 'trie': there is no such method.*use tree.*or ngram"),
        ({"method": 3}, "method 3"),
        ({"method": ["tree"]}, "method .*tree"),
        ({"num_speculative_tokens": 5}, "no method"),
        ({"method": "ngram", "model": "draft"}, "'model' is no field of speculative_config"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens 0"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "num_speculative_tokens 33"),
        ({"method": "ngram", "num_speculative_tokens": 1.5}, "num_speculative_tokens 1.5"),
        ({"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 8}, "prompt_lookup_min 9 is above"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min 0"),
        ("[]", "neither a JSON object nor off"),
        ("{", "neither a JSON object nor off"),
        (True, "no mapping"),
    ],
)
def test_others_are_refused_with_what_to_do(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_speculative(value)


def test_each_method_has_its_number_of_drafts_unless_it_is_given() -> None:
    assert as_speculative({"method": "tree"}) == SpeculativeConfig("tree", 16)
    assert as_speculative({"method": "ngram"}) == SpeculativeConfig("ngram", 8)
    assert SpeculativeConfig("tree") == SpeculativeConfig("tree", 16)
    assert as_speculative({"method": "tree", "num_speculative_tokens": 3}) == SpeculativeConfig("tree", 3)
    assert as_speculative(str(SpeculativeConfig("tree"))) == SpeculativeConfig("tree")


def test_a_length_that_is_not_given_gives_way() -> None:
    assert as_speculative({"method": "ngram", "prompt_lookup_max": 2}) == SpeculativeConfig("ngram", 8, 2, 2)
    assert as_speculative({"method": "ngram", "prompt_lookup_min": 10}) == SpeculativeConfig("ngram", 8, 10, 10)


def test_a_flag_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--speculative-config", '{"method": "eagle"}')
    assert "method 'eagle': this release has no method with a draft head" in capsys.readouterr().err


SGLANG = [
    ({"speculative_algorithm": "NGRAM"}, SpeculativeConfig("tree", 16)),
    ({"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 12}, SpeculativeConfig("tree", 11)),
    (
        {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 33,
            "speculative_ngram_min_match_window_size": 1,
            "speculative_ngram_max_match_window_size": 12,
            "speculative_ngram_max_bfs_breadth": 1,
        },
        SpeculativeConfig("tree", 32, prompt_lookup_max=12, prompt_lookup_min=1),
    ),
]
REFUSED = [
    ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm.*EAGLE.*needs a model.*use NGRAM"),
    ({"speculative_num_draft_tokens": 12}, "speculative_num_draft_tokens.*add speculative_algorithm NGRAM"),
    ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1}, "speculative_num_draft_tokens 1 must"),
    (
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 34},
        "speculative_num_draft_tokens 34 must",
    ),
    (
        {"speculative_algorithm": "NGRAM", "speculative_ngram_max_match_window_size": 65},
        "speculative_ngram_max_match_window_size 65 must",
    ),
    (
        {"speculative_algorithm": "NGRAM", "speculative_config": '{"method": "tree"}'},
        "speculative_algorithm and .*speculative.config.* are the same setting",
    ),
    ({"speculative_ngram_max_bfs_breadth": 10}, "speculative.ngram.max.bfs.breadth.* is not supported"),
    ({"speculative_ngram_match_type": "PROB"}, "speculative.ngram.match.type.* is not supported"),
    ({"speculative_ngram_capacity": 1000}, "speculative.ngram.capacity.* is not supported"),
    ({"speculative_draft_model_path": "org/name"}, "speculative.draft.model.path.* is not supported.*method.*tree"),
]


def flags_of(settings: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


@pytest.mark.parametrize(("settings", "expected"), SGLANG)
def test_sglangs_names_are_fields_of_ours(settings: dict[str, Any], expected: SpeculativeConfig) -> None:
    assert parse(*flags_of(settings)).scheduler.speculative_config == expected
    names = SettingNames(Place.LLM, "LLM", ConfigError)
    assert names.resolve(settings, ["speculative_config"])[0] == {"speculative_config": expected}


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_sglangs_names_cannot_mean_is_refused(
    settings: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*flags_of(settings))
    assert re.search(message, capsys.readouterr().err)
    with pytest.raises((ConfigError, UnsupportedFeature), match=message):
        SettingNames(Place.LLM, "LLM", ConfigError).resolve(settings, ["speculative_config"])
