"""``radixkv explain``: the cached part of prompts on a running server, and why it ends there; or a block table."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from radixkv.cli.offline import is_utf8
from radixkv.cli.table_report import TablesResponse, table_lines
from radixkv.errors import ConfigError
from radixkv.settings.arguments import Parser
from radixkv.settings.client_flags import add_client_flags, api_key
from radixkv.terminal import Progress
from radixkv.text.printable import printable

if TYPE_CHECKING:
    from radixkv.cli.server_client import ServerClient

N_CONTEXT_TOKENS = 12
"""Tokens shown on either side of the end of the match."""
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "text", "input_ids", "input")
"""What completions, vLLM, SGLang and embeddings call a prompt."""
_MESSAGES_FIELDS = ("system", "stop_sequences", "thinking", "anthropic_version", "context_management")
"""Fields of Anthropic's Messages that OpenAI's chats do not have."""
_MESSAGES_PARTS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
"""Types of parts of a content that only Anthropic's Messages have."""


class TokenizeResponse(msgspec.Struct):
    """The response of ``/tokenize``."""

    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    """The response of ``/detokenize``."""

    prompt: str


class FirstDifference(msgspec.Struct):
    """The first token where the prompt differs from the cache."""

    position: int


class ModelInfo(msgspec.Struct):
    """The response of ``/model_info``."""

    is_generation: bool = True


class ExplainResponse(msgspec.Struct):
    """The response of ``/cache/explain``."""

    text: str
    cached_tokens: int
    first_difference: FirstDifference | None = None
    prompt_token_ids: list[int] = []


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "explain",
        help=summary,
        description="Ask a running radixkv server how much of a prompt is in its prefix cache, where the match "
        "ends, and why; or with --request which pages a running request has. This computes nothing and does not "
        "change the cache.",
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
        '{"messages": [...]}, {"prompt": ...} or {"input": ...}',
    )
    prompt.add_argument(
        "--cache-salt",
        metavar="SALT",
        help="cache salt of the prompt, its cache namespace (default: that of each request in --file, or none)",
    )
    prompt.add_argument(
        "--model",
        metavar="NAME",
        help="name of an adapter whose pages the prompt may find, or of the model (default: that of each request "
        "in --file, or the model)",
    )
    parser.add_argument(
        "--request",
        metavar="ID",
        help="show the block table of this running request instead: the id of its reply (chatcmpl-..., cmpl-...), "
        "or its X-Request-Id; needs the operator's key",
    )
    add_client_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the reports, in the order of the requests, and returns the exit code."""
    if args.request is not None:
        return _show_table(args)
    requests = _requests(args)
    from radixkv.cli.server_client import ServerClient, ServerError

    reports = []
    with Progress(f"asking {args.base_url}"), ServerClient(args.base_url, api_key(args)) as client:
        for request in requests:
            try:
                explanation = _explained(client, _with_flags(request, args))
                reports += _report(client, explanation, request.where)
            except ServerError as error:
                raise ServerError(f"{request.where}{error}") from None
    print("\n".join(reports))
    return 0


def _show_table(args: argparse.Namespace) -> int:
    """Prints the block table of a running request."""
    parser: Parser = args.parser
    if any(value is not None for value in (args.prompt, args.file, args.cache_salt, args.model)):
        parser.error(
            "--request shows what a running request has; give no PROMPT, --file, --cache-salt or --model with it"
        )
    from radixkv.cli.server_client import ServerClient

    with Progress(f"asking {args.base_url}"), ServerClient(args.base_url, api_key(args)) as client:
        response = client.get(f"/cache/tables?request={quote(args.request, safe='')}", TablesResponse)
    print("\n".join(map(printable, table_lines(response))))
    return 0


@dataclass(frozen=True)
class _Request:
    """A request whose prompt to explain."""

    body: dict[str, Any]
    """A chat, a prompt as a text or token ids, or a body for ``path``."""
    path: str | None = None
    """The API that the body is for, if that is neither completions nor chats."""
    where: str = ""
    """Its place in a file of several, which begins its report."""


def _requests(args: argparse.Namespace) -> list[_Request]:
    """Returns the requests of ``--file``, or the one whose prompt is an argument or standard input."""
    parser: Parser = args.parser
    if args.prompt is not None and args.file is not None:
        parser.error("the prompt is given twice, as an argument and as --file; give it once")
    if args.prompt is not None:
        text: str = args.prompt
    else:
        try:
            text = sys.stdin.read() if args.file is None else args.file.read_text(encoding="utf-8-sig")
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
    if requests := _parsed(text):
        return requests
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines or not _parsed(lines[0][1]):
        return None
    for number, line in lines:
        parsed = _parsed(line, f"line {number}: ")
        if not parsed:
            raise ConfigError(
                f"line {number} of {file} is no request; each line must be a JSON object with messages, a prompt "
                "or an input"
            )
        requests += parsed
    return requests


def _parsed(text: str, where: str = "") -> list[_Request]:
    """Returns the request that a JSON object describes, once for each of its prompts; none: it is no such object.

    It may be the body itself or, as in files of OpenAI's batches, have it as ``body``.
    """
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return []
    if not isinstance(body, dict):
        return []
    url, inner = body.get("url"), body.get("body")
    body = inner if isinstance(inner, dict) else body
    if body.get("messages") is not None:
        path = "/v1/messages" if url == "/v1/messages" or _is_for_messages(body) else None
        return [_Request(body, path, where)]
    names = [name for name in _PROMPT_FIELDS if body.get(name) is not None]
    if not names:
        return []
    if names == ["input"] and url != "/v1/embeddings" and not _are_texts(body["input"]):
        return [_Request(body, "/v1/responses", where)]
    prompt = body[names[0]]
    others = {name: value for name, value in body.items() if name not in _PROMPT_FIELDS}
    if not isinstance(prompt, list) or not all(isinstance(one, str | list) for one in prompt):
        return [_Request({**others, "prompt": prompt}, where=where)]
    places = [where] if len(prompt) == 1 else [f"{where}prompt {number}: " for number in range(1, len(prompt) + 1)]
    return [_Request({**others, "prompt": one}, where=place) for one, place in zip(prompt, places, strict=True)]


def _are_texts(given: object) -> bool:
    """Returns whether an input is a list of an embeddings request: of texts, token ids or lists of these."""
    return isinstance(given, list) and bool(given) and not any(isinstance(one, dict) for one in given)


def _is_for_messages(body: dict[str, Any]) -> bool:
    """Returns whether a chat is in the form of Anthropic's Messages, and not in that of OpenAI's chats."""
    contents = [message.get("content") for message in _objects(body.get("messages"))]
    return (
        any(name in body for name in _MESSAGES_FIELDS)
        or any("input_schema" in tool for tool in _objects(body.get("tools")))
        or any(part.get("type") in _MESSAGES_PARTS for content in contents for part in _objects(content))
    )


def _objects(values: object) -> list[dict[str, Any]]:
    """Returns the JSON objects of a list; nothing of anything else."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _with_flags(request: _Request, args: argparse.Namespace) -> _Request:
    """Returns the request with the salt and the model of the flags that are given."""
    body = request.body
    if args.cache_salt is not None:
        body = {**body, "cache_salt": args.cache_salt}
    if args.model is not None:
        body = {**body, "model": args.model}
        body.pop("lora_path", None)
    return replace(request, body=body)


def _explained(client: ServerClient, request: _Request) -> ExplainResponse:
    """Returns the server's explanation with the token ids of the prompt."""
    text = request.body.get("input")
    if isinstance(text, str) and not client.get("/model_info", ModelInfo).is_generation:
        request = replace(request, body={**request.body, "prompt": text}, path=None)  # the server makes vectors
    if request.path is not None:
        path = f"/cache/explain?path={request.path}&return_token_ids=true"
        return client.post(path, request.body, ExplainResponse)
    prompt = request.body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        ids = prompt
    else:
        ids = client.post("/tokenize", request.body, TokenizeResponse).tokens
    question = {"prompt": ids, "cache_salt": request.body.get("cache_salt")}
    if (model := request.body.get("model") or request.body.get("lora_path")) is not None:
        question["model"] = model  # whose pages the request may find; SGLang's bodies have an adapter's name apart
    explanation = client.post("/cache/explain", question, ExplainResponse)
    explanation.prompt_token_ids = ids
    return explanation


def _report(client: ServerClient, explanation: ExplainResponse, where: str) -> list[str]:
    """Returns the lines to print: the server's explanation, then the text around the end of the match."""
    ids = explanation.prompt_token_ids
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
