"""Flags that other engines have, and this one has no use for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--pipeline-parallel-size", "-pp", "--pp-size"), "this release computes in one process; leave it out"),
    (("--data-parallel-size", "-dp", "--dp-size"), "this release computes in one process; leave it out"),
    (("--tokenizer-mode", "--skip-tokenizer-init"), "tokenizer.json is used where there is one; leave it out"),
    (("--quantization", "-q"), "weights are used as they are, in --dtype; leave it out"),
    (("--enable-lora", "--lora-paths"), "this release has no adapters; leave it out"),
    (("--speculative-config", "--speculative-algorithm"), "this release does not speculate; leave it out"),
    (("--trust-remote-code",), "code from a checkpoint is never run; leave it out"),
    (("--enable-auto-tool-choice", "--tool-call-parser"), "this release has no tools; leave it out"),
    (("--reasoning-parser",), "this release gives answers as the model writes them; leave it out"),
    (("--kv-events-config",), "this release publishes no events; leave it out"),
    (("--kv-transfer-config", "--enable-hierarchical-cache"), "the cache is in memory only; leave it out"),
    (("--attention-backend",), "each device has one; leave it out"),
    (("--no-enable-chunked-prefill",), "prompts are always computed in chunks; leave it out"),
    (("--log-level", "--uvicorn-log-level"), "the log has one level; leave it out"),
    (("--log-requests", "--enable-log-requests"), "requests are not logged; leave it out"),
    (("--allowed-methods", "--allowed-headers"), "pages of --allowed-origins may send any; leave it out"),
    (("--allow-credentials",), "cookies mean nothing here, pages send the key in Authorization; leave it out"),
    (("--ssl-keyfile", "--ssl-certfile"), "this server speaks plain HTTP; put a proxy with TLS before it"),
)
"""Flags of features that are not built, and what to do instead."""

_ALWAYS_ON = ("--enable-chunked-prefill",)
"""Flags that ask for what is so anyway."""


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Takes those that ask for what is so anyway, and refuses the others by name."""
    add_always_on(parser, _ALWAYS_ON)
    for flags, reason in REFUSED:
        parser.add_argument(*flags, action=_Refuse, reason=reason)


def add_always_on(parser: argparse.ArgumentParser, flags: Sequence[str]) -> None:
    """Takes flags that ask for what is so anyway."""
    parser.add_argument(
        *flags, dest="always_on", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


class _Refuse(argparse.Action):
    """A flag of a feature that is not built."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, reason: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.reason = reason

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} is not supported: {self.reason}")
