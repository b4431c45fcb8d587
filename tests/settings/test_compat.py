"""Tests of the table of other engines' names against what it speaks of."""

from __future__ import annotations

from collections import Counter
from inspect import signature

import pytest

from radixkv.cli.serve import add as add_serve
from radixkv.errors import ConfigError, UnsupportedFeature
from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest
from radixkv.frontend.api.sglang.schema import GenerateRequest, SamplingFields
from radixkv.llm import LLM
from radixkv.settings.arguments import Parser
from radixkv.settings.compat import ALIASES, Place, Refusal, SettingNames, refusals
from radixkv.settings.compat.table import REFUSED
from radixkv.wire.sampling import SamplingParams

OURS: dict[Place, set[str]] = {
    Place.LLM: set(signature(LLM).parameters) - {"settings"},
    Place.LLM_GENERATE: set(signature(LLM.generate).parameters),
    Place.LLM_CHAT: set(signature(LLM.chat).parameters),
    Place.SAMPLING: set(SamplingParams.__struct_fields__),
    Place.CHATS: set(ChatRequest.__struct_fields__) - {"echo"},
    Place.COMPLETIONS: set(CompletionRequest.__struct_fields__),
    Place.GENERATE: set(GenerateRequest.__struct_fields__),
    Place.GENERATE_SAMPLING: set(SamplingFields.__struct_fields__),
}


@pytest.mark.parametrize("place", list(Place))
def test_a_name_is_refused_by_one_row_at_most(place: Place) -> None:
    rows = Counter(
        name.partition("=")[0]
        for row in REFUSED
        for places, names in row.names.items()
        if place in places
        for name in names.split()
    )
    assert [name for name, count in rows.items() if count > 1] == []
    assert rows.keys() == refusals(place).keys()


@pytest.mark.parametrize("place", OURS)
def test_no_name_that_exists_is_refused_or_an_alias(place: Place) -> None:
    aliases = {name for places, names in ALIASES.items() if place in places for name in names}
    assert not OURS[place] & {*refusals(place), *aliases}


@pytest.mark.parametrize("place", [Place.LLM, Place.SAMPLING])
def test_every_alias_stands_for_a_setting(place: Place) -> None:
    meant = {name for places, names in ALIASES.items() if place in places for name in names.values()}
    assert {name.removeprefix("no_") for name in meant} <= OURS[place]


def test_every_alias_is_a_flag_of_serve() -> None:
    parser = Parser(prog="radixkv")
    commands = parser.add_subparsers(parser_class=Parser)
    add_serve(commands, "")
    shown = commands.choices["serve"].format_help()
    for places, names in ALIASES.items():
        if Place.FLAG in places:
            for name in (*names, *names.values()):
                assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("value", "asks_for_nothing"),
    [
        (None, True),
        ("", True),
        ([], True),
        ((), True),
        ({}, True),
        (1.0, True),
        (1, True),
        (True, False),
        (0, False),
        (False, False),
        ("1", False),
        (object(), False),
    ],
)
def test_empty_values_and_accepted_ones_ask_for_nothing(value: object, asks_for_nothing: bool) -> None:
    assert Refusal("length_penalty", "is refused", (1.0,)).asks_for_nothing(value) is asks_for_nothing


def test_an_empty_schema_asks_for_any_json() -> None:
    assert not refusals(Place.SAMPLING)["json_schema"].asks_for_nothing({})


def resolve(**settings: object) -> tuple[dict[str, object], dict[str, str]]:
    return SettingNames(Place.LLM, "LLM", ConfigError).resolve(settings, OURS[Place.LLM])


def test_the_host_tiers_size_has_the_unit_of_its_name() -> None:
    assert resolve(host_memory_bytes=5)[0] == {"host_memory_bytes": 5}
    assert resolve(kv_offloading_size=0.5, kv_offloading_backend="native")[0] == {"host_memory_bytes": 1 << 29}
    for order in (1, -1):
        settings = {"enable_hierarchical_cache": True, "hicache_size": 2, "hicache_write_policy": "write_through"}
        assert resolve(**dict(list(settings.items())[::order]))[0] == {
            "host_memory_bytes": 2 * 10**9,
            "write_policy": "write_through",
        }
    assert resolve(hicache_size="2")[0] == {"host_memory_bytes": 2 * 10**9}, "as of the flag"


def test_errors_name_a_size_in_bytes_as_ours() -> None:
    assert resolve(hicache_size=2)[1] == {}
    assert resolve(block_size=8)[1] == {"page_size": "block_size"}


def test_a_host_tier_is_refused_without_its_size() -> None:
    with pytest.raises(UnsupportedFeature, match="enable_hierarchical_cache True .*host_memory_bytes"):
        resolve(enable_hierarchical_cache=True)
    assert resolve(enable_hierarchical_cache=False) == ({}, {})
    with pytest.raises(UnsupportedFeature, match="hicache_ratio 2.0 .*host_memory_bytes"):
        resolve(hicache_ratio=2.0, hicache_size=4)
    with pytest.raises(UnsupportedFeature, match="hicache_storage_backend 'file' .*cache_dir"):
        resolve(hicache_storage_backend="file", hicache_size=4)
    with pytest.raises(ConfigError, match="hicache_size and kv_offloading_size are the same"):
        resolve(hicache_size=4, kv_offloading_size=4)
