"""What the commands share that compute in their own process."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from radixkv.cli.arguments import Parser, number, whole_number
from radixkv.config import EngineConfig
from radixkv.errors import RadixKVError
from radixkv.sampling import SamplingParams

if TYPE_CHECKING:
    from radixkv.llm import LLM

SCHEDULER_SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "schedule_policy")
"""Of ``SchedulerConfig``: what has a meaning where nothing queues."""

NUMBERS = (
    ("--temperature", number, "0 is greedy"),
    ("--top-p", number, "sample from the likeliest tokens up to this probability"),
    ("--top-k", whole_number, "sample from this many likeliest tokens, 0 for all"),
    ("--min-p", number, "sample from tokens at least this likely, relative to the likeliest"),
    ("--presence-penalty", number, "taken off the logits of tokens that the answer has"),
    ("--frequency-penalty", number, "taken off them once for each time that the answer has them"),
    ("--repetition-penalty", number, "divides the logits of tokens that prompt or answer has"),
    ("--max-tokens", whole_number, "most tokens of an answer"),
    ("--min-tokens", whole_number, "least tokens of an answer"),
    ("--seed", whole_number, "the same seed gives the same answer"),
)


def add_sampling_flags(parser: Parser) -> None:
    """``SamplingParams``, field by field; ``sampling_settings`` reads them."""
    group = parser.add_argument_group("sampling", "What is left out is as the checkpoint has it.")
    for flag, kind, text in NUMBERS:
        group.add_argument(flag, type=kind, metavar="TOKENS" if flag.endswith("-tokens") else None, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on past the end-of-sequence token"
    )


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that flags give; wrong values end as wrong usage."""
    parser: Parser = args.parser
    names = (name for name in SamplingParams.__struct_fields__ if name in args)
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    try:
        SamplingParams(**{"max_tokens": None} | given)
    except RadixKVError as error:
        parser.error(str(error))
    return given


def local_llm(config: EngineConfig, *, chat_template: str | None = None) -> LLM:
    """The engine in this process. Seconds, and it brings torch. Raises as ``LLM`` does; Ctrl-C ends the process."""
    if sys.stderr.isatty():
        print(f"radixkv: loading the model {config.model.model}", file=sys.stderr)
    scheduler = {name: vars(config.scheduler)[name] for name in SCHEDULER_SETTINGS}
    with _deadly_interrupts():
        from radixkv.llm import LLM

        return LLM(**asdict(config.model), **asdict(config.cache), **scheduler, chat_template=chat_template)


@contextmanager
def _deadly_interrupts() -> Iterator[None]:
    """Ctrl-C during the block ends the process at once; whoever ignores or handles it himself keeps what he set.

    While they load, extensions such as torch's lose a ``KeyboardInterrupt`` or break in the middle of it.
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


def is_text(text: str) -> bool:
    """Whether an argument or a line was UTF-8; Python keeps other bytes as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
