"""The ``radixkv`` command line: commands of this package, one a module, and those that other packages bring."""

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
    from radixkv.settings.arguments import Parser

EXAMPLES = """\
examples:
  radixkv serve                                   serve the embedded model on http://127.0.0.1:8000
  radixkv serve meta-llama/Llama-3.2-1B           serve a checkpoint from the hub or a folder
  radixkv chat                                    chat with the embedded model in the terminal
  radixkv generate "The dress of Kenji is green. Question: What colour is the dress of Kenji? Answer:"
                                                  answer one prompt without a server
  radixkv explain --file prompt.txt               show how much of a prompt a server has cached, and why no more
  radixkv top                                     show what a server's cache holds, live
  radixkv bench --workload fewshot --compare-cache
                                                  measure the prefix cache
  radixkv simulate --trace FILE --capacity 0.5M,5M,15M
                                                  compute the hit rate of recorded requests by cache size
  radixkv plan meta-llama/Llama-3.1-8B --gpu-memory 80GB --prompt 2000 --answer 300 --shared 1500
                                                  compute how many requests fit a GPU, and how long they may be
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 for success, 1 for a failure, 130 after Ctrl-C.

    Wrong usage raises ``SystemExit(2)``, as in argparse.
    """
    try:
        return _run_command(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("radixkv: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output closed the pipe
        _discard_output()
        return 1


def _run_command(arguments: Sequence[str]) -> int:
    parser = parser_for(arguments)
    args, unknown = parser.parse_known_args(arguments)
    command: Parser = args.parser
    if unknown:
        command.error(f"unknown arguments: {' '.join(unknown)}")
    _check_flag_positions(arguments, command)
    try:
        code = _run_checked(args, command)
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"{command.prog}: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _check_flag_positions(arguments: Sequence[str], command: Parser) -> None:
    """Rejects flags between a command and its subcommand: argparse accepts them, the subcommand ignores them."""
    words = command.prog.split()[1:]
    for argument, word in zip(arguments, words, strict=False):
        if argument != word:
            flag = argument.partition("=")[0]
            command.error(f"{flag} before {word} has no effect; give the flags of {word} after it")


def _run_checked(args: argparse.Namespace, command: Parser) -> int:
    try:
        code: int = args.run(args)
    except RadixKVError as error:
        print(f"{command.prog}: error: {command.with_typed_flags(str(error))}", file=sys.stderr)
        return 1
    return code


def _discard_output() -> None:
    """Redirects standard output to /dev/null, so that the interpreter does not retry the failed write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser_for(arguments: Sequence[str]) -> Parser:
    """Returns a parser for ``arguments``; only the commands that they name have flags."""
    # Imported here, so that Ctrl-C during the imports is handled by main.
    from radixkv.cli import chat, doctor, explain, generate, serve, top
    from radixkv.settings.arguments import Parser

    parser = Parser(
        prog="radixkv",
        description="An LLM serving engine built around a radix tree of cached KV pages.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for name, summary, add in (
        ("serve", "serve a model over HTTP with OpenAI's API", serve.add),
        ("chat", "chat with a model in the terminal", chat.add),
        ("generate", "answer one prompt without a server", generate.add),
        ("explain", "show how much of a prompt a server has cached, and why no more", explain.add),
        ("doctor", "show why prompts of a server were not cached, and what that cost", doctor.add),
        (
            "top",
            "show a server's cache live: hit rate, tiers, the largest runs of pages, why prompts missed",
            top.add,
        ),
        ("bench", "measure a server and the effect of its prefix cache", _add_bench),
        ("simulate", "compute the hit rate of recorded traffic by cache size", _add_simulate),
        ("plan", "compute how many requests fit a GPU, and how long they may be", _add_plan),
    ):
        if name in arguments:
            add(commands, summary)
        else:  # flags take ten times as long as the line in `radixkv --help`, and packages of others even more
            commands.add_parser(name, help=summary)
    return parser


def _add_bench(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    from radixkv.lab.bench import command
    from radixkv.lab.studies.paging import command as paging

    paging.add(command.add(commands, summary))


def _add_simulate(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    from radixkv.lab.simulator import command

    command.add(commands, summary)


def _add_plan(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    from radixkv.lab.planner import command

    command.add(commands, summary)
