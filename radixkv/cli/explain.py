"""``radixkv explain``: the cached part of a prompt on a running server, and why it ends there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from radixkv.arguments import Parser
from radixkv.cli.offline import is_utf8
from radixkv.errors import ConfigError
from radixkv.server_flags import add_server_flags, api_key
from radixkv.terminal_progress import Progress

if TYPE_CHECKING:
    from radixkv.cli.server_client import ServerClient

N_CONTEXT_TOKENS = 12
"""Tokens shown on either side of the end of the match."""


class TokenizeResponse(msgspec.Struct):
    """The response of ``/tokenize``."""

    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    """The response of ``/detokenize``."""

    prompt: str


class FirstDifference(msgspec.Struct):
    """The first token where the prompt differs from the cache."""

    position: int


class ExplainResponse(msgspec.Struct):
    """The response of ``/cache/explain``."""

    text: str
    cached_tokens: int
    first_difference: FirstDifference | None = None


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "explain",
        help="show how much of a prompt a server has cached, and why no more",
        description="Ask a running radixkv server how much of a prompt is in its prefix cache, where the match "
        "ends, and why. This computes nothing and does not change the cache.",
    )
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt's text (default: read standard input)"
    )
    prompt.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help='file with the prompt\'s text, or with a chat as a client sends it: {"messages": [...]}',
    )
    prompt.add_argument(
        "--cache-salt",
        metavar="SALT",
        help="cache salt of the prompt, its cache namespace (default: that of the chat in --file, or none)",
    )
    add_server_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report and returns the exit code."""
    request = _request(args)
    salt = request.get("cache_salt") if args.cache_salt is None else args.cache_salt
    from radixkv.cli.server_client import ServerClient

    with Progress(f"asking {args.base_url}"), ServerClient(args.base_url, api_key(args)) as client:
        ids = client.post("/tokenize", request, TokenizeResponse).tokens
        explanation = client.post("/cache/explain", {"prompt": ids, "cache_salt": salt}, ExplainResponse)
        lines = _report(client, ids, explanation)
    print("\n".join(lines))
    return 0


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the body of ``/tokenize``: the chat of ``--file``, or the prompt's text."""
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
    if not is_utf8(text):
        parser.error("the prompt is not UTF-8 text")
    if not text:
        parser.error("the prompt is empty")
    chat = None if args.file is None else _chat(text)
    return {"prompt": text} if chat is None else chat


def _chat(text: str) -> dict[str, Any] | None:
    """Returns the chat that a file's text is; None: it is not a JSON object with ``messages``."""
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return body if isinstance(body, dict) and "messages" in body else None


def _report(client: ServerClient, ids: list[int], explanation: ExplainResponse) -> list[str]:
    """Returns the lines to print: the server's explanation, then the text around the end of the match."""
    lines = [explanation.text]
    end = (
        explanation.cached_tokens if explanation.first_difference is None else explanation.first_difference.position
    )
    if end > 0:
        before = "..." if end > N_CONTEXT_TOKENS else ""
        lines.append(
            f"  up to token {end}: {before}{_quoted_text(client, ids[max(0, end - N_CONTEXT_TOKENS) : end])}"
        )
    if end < len(ids):
        after = "..." if end + N_CONTEXT_TOKENS < len(ids) else ""
        lines.append(f"  and from there on: {_quoted_text(client, ids[end : end + N_CONTEXT_TOKENS])}{after}")
    return lines


def _quoted_text(client: ServerClient, ids: list[int]) -> str:
    return repr(client.post("/detokenize", {"tokens": ids}, DetokenizeResponse).prompt)
