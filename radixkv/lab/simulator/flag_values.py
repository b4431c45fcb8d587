"""Parsers of the values of ``radixkv simulate``'s flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.settings.arguments import whole_number

if TYPE_CHECKING:
    from radixkv.lab.simulator.caches import Capacity

MAX_SERVERS = 10_000
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_CAPACITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)((?:[kmg]i?)?)")
_TIER_SIZE = re.compile(r"\s*(?:(\w+)\s*=)?(.*)", re.DOTALL)
_TIER_BEFORE = {"host": "device", "disk": "host"}
"""The tier that must be given before a tier."""


def parse_trace(text: str) -> Path:
    """Returns the path of a trace; refuses standard input."""
    if text == "-":
        raise argparse.ArgumentTypeError(
            "the trace is read twice, so it cannot be standard input; save it as a file"
        )
    return Path(text)


def parse_capacities(text: str) -> list[Capacity]:
    """Parses plain sizes and tiers: ``1M,device=0.5M,host=5M`` is one capacity without other tiers and one with."""
    from radixkv.lab.simulator.caches import Capacity

    capacities: list[Capacity] = []
    tier_before = ""
    for part in text.split(","):
        match = _TIER_SIZE.fullmatch(part)
        assert match is not None, "the pattern matches any text"
        tier, size = (match[1] or "").lower(), match[2]
        if tier not in ("", "device", "host", "disk"):
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is not a tier; use device=, host= and disk=")
        if tier in _TIER_BEFORE and _TIER_BEFORE[tier] != tier_before:
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} needs {_TIER_BEFORE[tier]}= before it: device=0.5M,host=5M,disk=50M"
            )
        n_tokens, tier_before = _n_tokens(size), tier
        if tier == "host":
            capacities[-1] = capacities[-1]._replace(host=n_tokens)
        elif tier == "disk":
            capacities[-1] = capacities[-1]._replace(disk=n_tokens)
        else:
            capacities.append(Capacity(n_tokens))
    return list(dict.fromkeys(capacities))


def _n_tokens(text: str) -> int:
    match = _CAPACITY.fullmatch(text.strip().lower())
    n_tokens = Fraction(match[1]) * _UNITS[match[2]] if match is not None else Fraction(0)
    if n_tokens < 1 or n_tokens.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens; write 500000, 512k or 0.5M")
    return int(n_tokens)


def parse_names(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Parses names that are separated by commas; each is one of ``known``."""
    names = [(name, name.strip().lower()) for name in text.split(",")]
    for typed, name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{typed!r} is not a {what}; use {', '.join(known)}, or several")
    return tuple(dict.fromkeys(name for _, name in names))


def parse_server_counts(text: str) -> tuple[int, ...]:
    """Parses numbers of servers that are separated by commas, each at most ``MAX_SERVERS``."""
    counts: list[int] = []
    for part in text.split(","):
        n_servers = whole_number(part.strip())
        if not 1 <= n_servers <= MAX_SERVERS:
            raise argparse.ArgumentTypeError(f"{n_servers} servers are not 1 to {MAX_SERVERS:,}; give such numbers")
        counts.append(n_servers)
    return tuple(dict.fromkeys(counts))
