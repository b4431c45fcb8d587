"""Flags of vLLM and SGLang that radixkv does not support or does not need."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple


class UnsupportedFlags(NamedTuple):
    """Flags of a feature that radixkv does not support."""

    flags: tuple[str, ...]
    reason: str
    """Why the flags are not supported and what to do instead."""
    accepted_values: tuple[str, ...] = ()
    """Values that describe radixkv's own behaviour, and are therefore accepted."""


_ONE_DEVICE = "this release computes on one device; leave it out"
_NO_ADAPTERS = "this release has no adapters; leave it out"
_NO_MEDIA = "this release supports text only; leave it out"
_NO_GUIDES = "this release has no guided decoding; leave it out"

UNSUPPORTED_FLAGS = (
    UnsupportedFlags(("--pipeline-parallel-size", "-pp", "--pp-size"), _ONE_DEVICE, ("1",)),
    UnsupportedFlags(("--data-parallel-size", "-dp", "--dp-size"), _ONE_DEVICE, ("1",)),
    UnsupportedFlags(("--expert-parallel-size", "--ep-size", "--nnodes"), _ONE_DEVICE, ("1",)),
    UnsupportedFlags(("--enable-expert-parallel",), _ONE_DEVICE),
    UnsupportedFlags(("--disaggregation-mode",), "one process prefills and decodes; leave it out", ("null",)),
    UnsupportedFlags(("--tokenizer-mode",), "the tokenizer is always tokenizer.json; leave it out", ("auto",)),
    UnsupportedFlags(("--skip-tokenizer-init",), "tokenizer.json is loaded whenever there is one; leave it out"),
    UnsupportedFlags(
        ("--task", "--runner"), "this release only generates text; leave it out", ("generate", "auto")
    ),
    UnsupportedFlags(("--quantization", "-q"), "weights are not quantized, their type is --dtype; leave it out"),
    UnsupportedFlags(("--enable-lora", "--lora-paths", "--lora-modules", "--max-loras"), _NO_ADAPTERS),
    UnsupportedFlags(("--limit-mm-per-prompt", "--mm-processor-kwargs"), _NO_MEDIA),
    UnsupportedFlags(("--guided-decoding-backend", "--grammar-backend"), _NO_GUIDES),
    UnsupportedFlags(
        ("--speculative-config", "--speculative-algorithm"),
        "this release has no speculative decoding; leave it out",
    ),
    UnsupportedFlags(("--trust-remote-code",), "code from a checkpoint is never run; leave it out"),
    UnsupportedFlags(
        ("--enable-auto-tool-choice", "--tool-call-parser"), "this release has no tool calls; leave it out"
    ),
    UnsupportedFlags(("--reasoning-parser",), "answers are returned as the model writes them; leave it out"),
    UnsupportedFlags(("--kv-events-config",), "this release does not publish cache events; leave it out"),
    UnsupportedFlags(
        ("--kv-transfer-config", "--enable-hierarchical-cache"),
        "the cache is only in the device's memory; leave it out",
    ),
    UnsupportedFlags(
        ("--swap-space", "--cpu-offload-gb"), "this release does not offload to the CPU; leave it out", ("0",)
    ),
    UnsupportedFlags(("--attention-backend",), "each device has a single attention backend; leave it out"),
    UnsupportedFlags(
        ("--compilation-config", "-O"),
        "compilation cannot be configured; leave it out (CUDA graphs: --enforce-eager)",
    ),
    UnsupportedFlags(("--no-enable-chunked-prefill",), "chunked prefill cannot be turned off; leave it out"),
    UnsupportedFlags(("--stream-interval",), "every token is streamed at once; leave it out", ("1",)),
    UnsupportedFlags(("--config",), "settings are not read from files; give them as flags instead"),
    UnsupportedFlags(("--log-level", "--uvicorn-log-level"), "the log has one level; leave it out", ("info",)),
    UnsupportedFlags(("--log-requests", "--enable-log-requests"), "requests are not logged; leave it out"),
    UnsupportedFlags(
        ("--allowed-methods", "--allowed-headers"),
        "origins of --allowed-origins may use any method and header; leave it out",
    ),
    UnsupportedFlags(
        ("--allow-credentials",), "the server ignores cookies, send the key in Authorization; leave it out"
    ),
    UnsupportedFlags(
        ("--ssl-keyfile", "--ssl-certfile"), "the server only speaks plain HTTP; put a TLS proxy in front of it"
    ),
)

_NO_OP_FLAGS = ("--enable-chunked-prefill", "--async-scheduling")
"""Flags that turn on what radixkv always does."""


def add_compat_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of other engines: those without effect are accepted, the others rejected by name."""
    add_no_op_flags(parser, _NO_OP_FLAGS)
    for unsupported in UNSUPPORTED_FLAGS:
        parser.add_argument(*unsupported.flags, action=_RejectFlag, unsupported=unsupported)


def add_no_op_flags(parser: argparse.ArgumentParser, flags: Sequence[str]) -> None:
    """Adds flags that are accepted and have no effect."""
    parser.add_argument(
        *flags, dest="no_op", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


class _RejectFlag(argparse.Action):
    """Ends the command with wrong usage, unless the value is one of the accepted ones."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, unsupported: UnsupportedFlags) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._unsupported = unsupported

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if values not in self._unsupported.accepted_values:
            parser.error(f"{option_string} is not supported: {self._unsupported.reason}")
