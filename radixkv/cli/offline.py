"""Helpers for the commands that run the engine in their own process."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from radixkv.errors import RadixKVError
from radixkv.settings.arguments import Parser, count, number, whole_number
from radixkv.settings.config import EngineConfig
from radixkv.terminal import Progress
from radixkv.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from radixkv.llm import LLM

NUMERIC_FLAGS = (
    ("--temperature", number, "sampling temperature; 0 is greedy decoding"),
    ("--top-p", number, "sample from the most likely tokens whose probabilities add up to this"),
    ("--top-k", whole_number, "sample from this many most likely tokens; 0 for all"),
    ("--min-p", number, "sample from tokens at least this likely, relative to the most likely one"),
    ("--presence-penalty", number, "subtracted from the logits of tokens that are in the answer"),
    ("--frequency-penalty", number, "subtracted from a token's logit for each time it occurs in the answer"),
    ("--repetition-penalty", number, "divides the logits of tokens that are in the prompt or the answer"),
    ("--max-tokens", count, "maximum number of tokens of an answer"),
    ("--min-tokens", count, "minimum number of tokens of an answer"),
    ("--seed", whole_number, "sampling seed; the same seed gives the same answer"),
)
"""Flag, type of its value and help."""


def add_sampling_flags(parser: Parser) -> None:
    """Adds flags for the common fields of ``SamplingParams``; ``sampling_settings`` reads them."""
    group = parser.add_argument_group("sampling", "Defaults are those of the checkpoint's generation_config.json.")
    for flag, kind, text in NUMERIC_FLAGS:
        group.add_argument(flag, type=kind, metavar="TOKENS" if flag.endswith("-tokens") else None, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop the answer before this text; may be repeated"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="continue after the end-of-sequence token"
    )


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of ``SamplingParams`` that are set by flags; wrong values end as wrong usage."""
    parser: Parser = args.parser
    names = (name for name in SamplingParams.__struct_fields__ if name in args)
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    try:
        SamplingParams(**{"max_tokens": None} | given)
    except RadixKVError as error:
        parser.error(str(error))
    return given


def load_llm(config: EngineConfig, *, chat_template: str | None = None) -> LLM:
    """Loads the engine into this process: takes seconds and imports torch. Ctrl-C meanwhile ends the process.

    Raises:
        RadixKVError: as in ``LLM``.
    """
    with _fatal_interrupts(), Progress(f"loading the model {config.model.model}") as progress:
        from radixkv.llm import LLM

        return LLM(
            **asdict(config.model),
            **asdict(config.cache),
            **asdict(config.scheduler) | {"target_itl_ms": None},  # nobody else waits for tokens
            chat_template=chat_template,
            show_download=progress.show,
        )


@contextmanager
def _fatal_interrupts() -> Iterator[None]:
    """Makes Ctrl-C end the process at once during the block, unless the process has its own SIGINT handler.

    Extension modules such as torch's may swallow a ``KeyboardInterrupt`` while they load, or fail half loaded.
    """
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_pythons or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_utf8(text: str) -> bool:
    """Returns whether an argument or a line was valid UTF-8; Python decodes other bytes as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
