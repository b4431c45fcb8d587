"""``radixkv explain``: how much of a prompt a running server has cached, and why no more."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from radixkv.cli.arguments import Parser
from radixkv.cli.offline import is_text
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.cli.server_client import Server

N_AROUND = 12
"""Tokens that are shown on either side of the end of the match."""


class Tokenized(msgspec.Struct):
    """Of what ``/tokenize`` answers."""

    tokens: list[int]


class Detokenized(msgspec.Struct):
    """Of what ``/detokenize`` answers."""

    prompt: str


class Difference(msgspec.Struct):
    """Where prompt and cache go apart."""

    position: int


class Explanation(msgspec.Struct):
    """Of what ``/cache/explain`` answers."""

    text: str
    cached_tokens: int
    first_difference: Difference | None = None


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "explain",
        help="how much of a prompt a server has cached, and why no more",
        description="Ask a running radixkv server how much of a prompt its prefix cache has, where the match ends, "
        "and why. Nothing is computed, and the cache does not change.",
    )
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; without it, standard input is read")
    prompt.add_argument("--file", type=Path, metavar="FILE", help="a file that holds the text instead")
    prompt.add_argument("--cache-salt", default="", metavar="SALT", help="the namespace that is asked about")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default: %(default)s)"
    )
    server.add_argument("--api-key", metavar="KEY", help="the key that it asks for")
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report; the exit code."""
    prompt = _prompt(args)
    from radixkv.cli.server_client import Server

    with Server(args.base_url, args.api_key) as server:
        ids = server.post("/tokenize", {"prompt": prompt}, Tokenized).tokens
        found = server.post("/cache/explain", {"prompt": ids, "cache_salt": args.cache_salt}, Explanation)
        print("\n".join(_report(server, ids, found)))
    return 0


def _prompt(args: argparse.Namespace) -> str:
    parser: Parser = args.parser
    if args.prompt is not None and args.file is not None:
        parser.error("the prompt is given twice, as an argument and as --file; give it once")
    if args.prompt is not None:
        text: str = args.prompt
    else:
        try:
            text = sys.stdin.read() if args.file is None else args.file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            parser.error("the prompt is not UTF-8 text")
        except OSError as error:
            raise ConfigError(f"cannot read --file {args.file}: {error.strerror}") from None
    if not is_text(text):
        parser.error("the prompt is not UTF-8 text")
    if not text:
        parser.error("the prompt is empty")
    return text


def _report(server: Server, ids: list[int], found: Explanation) -> list[str]:
    """The server's sentence, then the text on either side of where the match ends."""
    lines = [found.text]
    end = found.cached_tokens if found.first_difference is None else found.first_difference.position
    if end > 0:
        before = "..." if end > N_AROUND else ""
        lines.append(f"  up to token {end}: {before}{_shown(server, ids[max(0, end - N_AROUND) : end])}")
    if end < len(ids):
        after = "..." if end + N_AROUND < len(ids) else ""
        lines.append(f"  and from there on: {_shown(server, ids[end : end + N_AROUND])}{after}")
    return lines


def _shown(server: Server, ids: list[int]) -> str:
    return repr(server.post("/detokenize", {"tokens": ids}, Detokenized).prompt)
