"""The ``radixkv`` command: one module a command."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from radixkv import __version__
from radixkv.errors import RadixKVError

if TYPE_CHECKING:
    from radixkv.cli.arguments import Parser

EXAMPLES = """\
examples:
  radixkv serve                                   serve the embedded model on http://127.0.0.1:8000
  radixkv serve meta-llama/Llama-3.2-1B           serve a checkpoint of the hub, or of a folder
  radixkv chat                                    talk to it, and see what each turn reused
  radixkv generate "The dress of Kenji is green. Question: What colour is the dress of Kenji? Answer:"
                                                  one answer, without a server
  radixkv explain --file prompt.txt               how much of a prompt the server has cached, and why no more
  radixkv bench --workload fewshot --compare-cache
                                                  measure the prefix cache
  radixkv simulate --trace FILE --capacity 0.5M,5M,15M
                                                  what caches of other sizes would find of recorded requests
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C.

    Wrong usage leaves as ``SystemExit(2)``, as argparse does.
    """
    try:
        return _command(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        _drop_output()
        return 1


def _command(arguments: Sequence[str]) -> int:
    parser = _parser()
    args, unknown = parser.parse_known_args(arguments)
    command: Parser = args.parser
    if unknown:
        command.error(f"unknown arguments: {' '.join(unknown)}")
    _check_order(arguments, command)
    try:
        code = _run(args, command)
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(f"{command.prog}: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _check_order(arguments: Sequence[str], command: Parser) -> None:
    """Refuses flags between a command and the one below it: argparse takes them, and nobody would read them."""
    words = command.prog.split()[1:]
    for argument, word in zip(arguments, words, strict=False):
        if argument != word:
            flag = argument.partition("=")[0]
            command.error(f"{flag} stands before {word}, which does not read it; give its flags behind {word}")


def _run(args: argparse.Namespace, command: Parser) -> int:
    try:
        code: int = args.run(args)
    except RadixKVError as error:
        print(f"{command.prog}: error: {command.as_typed(str(error))}", file=sys.stderr)
        return 1
    return code


def _drop_output() -> None:
    """So that what could not be written is not tried again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> Parser:
    # Only now, so that Ctrl-C ends it quietly while they are read.
    from radixkv.cli import bench, chat, explain, generate, serve, simulate
    from radixkv.cli.arguments import Parser

    parser = Parser(
        prog="radixkv",
        description="An LLM serving engine built around a radix tree of cached KV pages.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (serve, chat, generate, explain, bench, simulate):
        command.add(commands)
    return parser
