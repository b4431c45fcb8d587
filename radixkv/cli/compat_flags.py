"""Flags that other engines have, and this one has no use for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple


class Refused(NamedTuple):
    """Flags of a feature that is not built."""

    flags: tuple[str, ...]
    reason: str
    """And what to do."""
    neutral: tuple[str, ...] = ()
    """Values that ask for what is so anyway."""


_ONE_DEVICE = "this release computes on one device; leave it out"
_NO_ADAPTERS = "this release has no adapters; leave it out"
_NO_MEDIA = "this release takes text only; leave it out"
_NO_GUIDES = "this release has no guided decoding; leave it out"

REFUSED = (
    Refused(("--pipeline-parallel-size", "-pp", "--pp-size"), _ONE_DEVICE, ("1",)),
    Refused(("--data-parallel-size", "-dp", "--dp-size"), _ONE_DEVICE, ("1",)),
    Refused(("--expert-parallel-size", "--ep-size", "--nnodes"), _ONE_DEVICE, ("1",)),
    Refused(("--enable-expert-parallel",), _ONE_DEVICE),
    Refused(("--disaggregation-mode",), "one process prefills and decodes; leave it out", ("null",)),
    Refused(("--tokenizer-mode",), "tokenizer.json is used where there is one; leave it out", ("auto",)),
    Refused(("--skip-tokenizer-init",), "tokenizer.json is used where there is one; leave it out"),
    Refused(
        ("--task", "--runner"), "this release generates text, and nothing else; leave it out", ("generate", "auto")
    ),
    Refused(("--quantization", "-q"), "weights are used as they are, in --dtype; leave it out"),
    Refused(("--enable-lora", "--lora-paths", "--lora-modules", "--max-loras"), _NO_ADAPTERS),
    Refused(("--limit-mm-per-prompt", "--mm-processor-kwargs"), _NO_MEDIA),
    Refused(("--guided-decoding-backend", "--grammar-backend"), _NO_GUIDES),
    Refused(("--speculative-config", "--speculative-algorithm"), "this release does not speculate; leave it out"),
    Refused(("--trust-remote-code",), "code from a checkpoint is never run; leave it out"),
    Refused(("--enable-auto-tool-choice", "--tool-call-parser"), "this release has no tools; leave it out"),
    Refused(("--reasoning-parser",), "this release gives answers as the model writes them; leave it out"),
    Refused(("--kv-events-config",), "this release publishes no events; leave it out"),
    Refused(("--kv-transfer-config", "--enable-hierarchical-cache"), "the cache is in memory only; leave it out"),
    Refused(("--swap-space", "--cpu-offload-gb"), "nothing is moved off the device; leave it out", ("0",)),
    Refused(("--attention-backend",), "each device has one; leave it out"),
    Refused(
        ("--compilation-config", "-O"), "nothing is compiled to order; leave it out (CUDA graphs: --enforce-eager)"
    ),
    Refused(("--no-enable-chunked-prefill",), "prompts are always computed in chunks; leave it out"),
    Refused(("--stream-interval",), "tokens are sent as they come; leave it out", ("1",)),
    Refused(("--config",), "settings are not read from files; give them as flags"),
    Refused(("--log-level", "--uvicorn-log-level"), "the log has one level; leave it out", ("info",)),
    Refused(("--log-requests", "--enable-log-requests"), "requests are not logged; leave it out"),
    Refused(("--allowed-methods", "--allowed-headers"), "pages of --allowed-origins may send any; leave it out"),
    Refused(
        ("--allow-credentials",), "cookies mean nothing here, pages send the key in Authorization; leave it out"
    ),
    Refused(("--ssl-keyfile", "--ssl-certfile"), "this server speaks plain HTTP; put a proxy with TLS before it"),
)

_ALWAYS_ON = ("--enable-chunked-prefill", "--async-scheduling")
"""Flags that ask for what is so anyway."""


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Takes those that ask for what is so anyway, and refuses the others by name."""
    add_always_on(parser, _ALWAYS_ON)
    for refused in REFUSED:
        parser.add_argument(*refused.flags, action=_Refuse, refused=refused)


def add_always_on(parser: argparse.ArgumentParser, flags: Sequence[str]) -> None:
    """Takes flags that ask for what is so anyway."""
    parser.add_argument(
        *flags, dest="always_on", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


class _Refuse(argparse.Action):
    """Takes neutral values only."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, refused: Refused) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._refused = refused

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if values not in self._refused.neutral:
            parser.error(f"{option_string} is not supported: {self._refused.reason}")
