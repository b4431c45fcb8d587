"""``radixkv explain``: the cached part of prompts on a running server, and why it ends there."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
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
        help="file with the prompt's text, or with requests as clients send them, one or one a line: "
        '{"messages": [...]} or {"prompt": ...}',
    )
    prompt.add_argument(
        "--cache-salt",
        metavar="SALT",
        help="cache salt of the prompt, its cache namespace (default: that of each request in --file, or none)",
    )
    add_server_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the reports, in the order of the requests, and returns the exit code."""
    requests = _requests(args)
    from radixkv.cli.server_client import ServerClient, ServerError

    reports = []
    with Progress(f"asking {args.base_url}"), ServerClient(args.base_url, api_key(args)) as client:
        for request in requests:
            salt = request.body.get("cache_salt") if args.cache_salt is None else args.cache_salt
            where = "" if request.line is None else f"line {request.line}: "
            try:
                ids = _token_ids(client, request.body)
                explanation = client.post("/cache/explain", {"prompt": ids, "cache_salt": salt}, ExplainResponse)
                reports += _report(client, ids, explanation, where)
            except ServerError as error:
                raise ServerError(f"{where}{error}") from None
    print("\n".join(reports))
    return 0


@dataclass(frozen=True)
class _Request:
    """A prompt to explain."""

    body: dict[str, Any]
    """The body of ``/tokenize``: a chat, or a prompt as a text or token ids."""
    line: int | None = None
    """Its line in a file of several."""


def _requests(args: argparse.Namespace) -> list[_Request]:
    """Returns the requests of ``--file``, or the one whose prompt is an argument or standard input."""
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
    return (_recorded(text, args.file) if args.file is not None else None) or [_Request({"prompt": text})]


def _recorded(text: str, file: Path) -> list[_Request] | None:
    """Returns the requests that a file's text has, as one JSON object or one a line; None: it is a prompt's text.

    Raises:
        ConfigError: the first line is a request, and a later one is not.
    """
    if (body := _body(text)) is not None:
        return [_Request(body)]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines or _body(lines[0][1]) is None:
        return None
    requests = []
    for number, line in lines:
        if (body := _body(line)) is None:
            raise ConfigError(
                f"line {number} of {file} is no request; each line must be a JSON object with messages or a prompt"
            )
        requests.append(_Request(body, number))
    return requests


def _body(text: str) -> dict[str, Any] | None:
    """Returns the request that a JSON object describes; None: the text is no such object.

    It may be the body itself or, as in files of OpenAI's batches, have it as ``body``.
    """
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    inner = body.get("body")
    body = inner if isinstance(inner, dict) else body
    if "messages" in body or "prompt" in body:
        return body
    return {**body, "prompt": body["prompt_token_ids"]} if "prompt_token_ids" in body else None


def _token_ids(client: ServerClient, body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    return client.post("/tokenize", body, TokenizeResponse).tokens


def _report(client: ServerClient, ids: list[int], explanation: ExplainResponse, where: str) -> list[str]:
    """Returns the lines to print: the server's explanation, then the text around the end of the match."""
    lines = [f"{where}{explanation.text}"]
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
