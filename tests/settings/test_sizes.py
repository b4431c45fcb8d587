"""Tests of sizes as texts: those of vLLM's ``--max-model-len 4k`` and of bytes, in every flag that takes a size."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from radixkv.cli import chat, generate, serve
from radixkv.errors import ConfigError
from radixkv.lab.bench import command as bench
from radixkv.lab.planner import command as plan
from radixkv.lab.simulator import command as simulate
from radixkv.lab.studies.paging import command as paging
from radixkv.settings.arguments import Parser
from radixkv.settings.values import parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("-1", -1),
        ("1k", 1000),  # the three examples of vLLM's documentation
        ("1K", 1024),
        ("25.6k", 25_600),
        ("2m", 2_000_000),
        ("2M", 2 << 20),
        ("1g", 10**9),
        ("1T", 1 << 40),
        ("4Ki", 4096),
        ("4ki", 4096),
        (" 0.5K ", 512),
    ],
)
def test_a_count_has_vllms_units(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1048576", 1 << 20),
        ("0", 0),
        ("4k", 4000),
        ("4K", 4096),
        ("4g", 4 * 10**9),
        ("4G", 4 << 30),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("2Gi", 2 << 30),
        ("2GB", 2 * 10**9),
        ("2gb", 2 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("1TB", 10**12),
        ("512B", 512),
        ("0.3KiB", 307),
    ],
)
def test_a_size_in_bytes_has_the_units_of_memory_and_of_disks(text: str, number: int) -> None:
    assert parse_bytes(text) == number


WRONG = [
    "",
    "k",
    "4 kk",
    "4x",
    "4e3",
    "1,000",
    "- 4k",
    "-4k",
    "nan",
    "4.k",
    ".5k",
    "4k 4k",
    "9" * 5000,
    "9" * 5000 + "k",
]


ALLOWED = {parse_count: r"4k \(4,000\) or 4K \(4,096\)", parse_bytes: "64GiB or 64G .* 64GB or 64g "}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *[(parse_count, text) for text in (*WRONG, "25.6K", "0.0001k", "0.5", "4KB", "4KiB")],
        *[(parse_bytes, text) for text in (*WRONG, "4KBB", "4iB", "4 bytes")],
    ],
)
def test_what_is_no_size_is_refused_with_the_allowed_forms(parse: Callable[[str], int], text: str) -> None:
    with pytest.raises(ConfigError, match=ALLOWED[parse]) as refused:
        parse(text)
    assert str(refused.value).startswith(repr(text) if len(text) < 30 else "'999")


def actions(command: str) -> list[argparse.Action]:
    """Returns the flags of a command."""
    parser = Parser(prog="radixkv")
    commands = parser.add_subparsers(parser_class=Parser)
    for each in (serve, chat, generate):
        each.add(commands, "")
    simulate.add(commands, "")
    plan.add(commands, "")
    paging.add(bench.add(commands, ""))
    *above, name = command.split()
    for word in above:
        found = commands.choices[word]
        (commands,) = (each for each in found._actions if isinstance(each, argparse._SubParsersAction))
    return commands.choices[name]._actions


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "bench", "bench paging", "simulate", "plan"])
def test_every_flag_for_tokens_or_bytes_takes_a_unit(command: str) -> None:
    sizes = {"TOKENS": "4k", "SEQUENCES": "1k", "REQUESTS": "1k", "COUNT": "1k", "SIZE": "2GiB", "BYTES": "2GiB"}
    n_seen = 0
    for action in actions(command):
        if action.metavar in sizes and action.option_strings != ["-n", "--n"]:
            n_seen += 1
            for flag in action.option_strings:
                parser = Parser(prog="test")
                parser._add_action(action)
                value = vars(parser.parse_args([f"{flag}={sizes[action.metavar]}"]))[action.dest]
                assert value == {"4k": 4000, "1k": 1000, "2GiB": 2 << 30}[sizes[action.metavar]], flag
    assert n_seen > 1
