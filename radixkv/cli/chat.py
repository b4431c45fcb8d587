"""``radixkv chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from radixkv.cli.offline import add_sampling_flags, is_utf8, load_llm, sampling_settings
from radixkv.errors import ConfigError, RadixKVError
from radixkv.settings.arguments import Parser, add_engine_flags, answering_config, engine_flags
from radixkv.settings.client_flags import DEFAULT_URL, add_key_flags, api_key, has_key_flag
from radixkv.terminal import Progress

if TYPE_CHECKING:
    from radixkv.cli.chat_backends import ChatBackend, Message, TurnStats

MAX_TOKENS = 512
"""Default of ``--max-tokens`` for answers of this process."""
PROBE_LIMIT_S = 2.0
"""Time limit of the question whether there is a server at the default address."""

HELP = "/clear starts a new conversation, /exit or end of input quits, Ctrl-C stops an answer"


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "chat",
        help=summary,
        description="Chat with a model in this process or on a server. After each answer a line shows how much of "
        f"the prompt came from the prefix cache. {HELP}.",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt (default: none)")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="file with a chat template, or name of one of the tokenizer's, such as tool_use (default: the "
        "tokenizer's, as Transformers chooses)",
    )
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help=f"chat with this running OpenAI-compatible server (default: the one at {DEFAULT_URL}, if it "
        "runs; without it, or with a model or a flag of the engine, the model runs in this process)",
    )
    add_key_flags(parser.add_argument_group("API key"), "API key of the server")
    add_sampling_flags(parser)
    add_engine_flags(parser, has_queue=False)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Chats until the input ends; returns the exit code."""
    if args.system is not None and not is_utf8(args.system):
        args.parser.error("the system prompt is not UTF-8 text")
    settings = sampling_settings(args)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 must not end the session
    with ExitStack() as stack:
        backend = _backend(args, settings, stack)
        if sys.stdin.isatty():
            print(f"({HELP})")
        Conversation(backend, args.system).run()
    return 0


def _backend(args: argparse.Namespace, settings: dict[str, Any], stack: ExitStack) -> ChatBackend:
    parser: Parser = args.parser
    config = answering_config(args, model=args.positional_model)
    model = args.positional_model or args.model
    flags = [flag for flag in engine_flags(config) if not flag.startswith("--model=")]
    if args.chat_template is not None:
        flags.append("--chat-template")
    is_for_this_process = model is not None or bool(flags)
    url = args.base_url
    if url is not None and flags:
        parser.error(
            f"{' '.join(flags)} cannot change the server at --base-url, which is already running; leave it out"
        )
    if url is None and has_key_flag(args):
        if is_for_this_process:
            parser.error(
                "--api-key and --api-key-file are for a running server; give its --base-url, or leave them out"
            )
        url = DEFAULT_URL
    if url is None and not is_for_this_process and (model := _served_model(api_key(args))) is not None:
        url = DEFAULT_URL
    if url is None:
        from radixkv.cli.chat_backends import LocalBackend

        llm = load_llm(config, chat_template=args.chat_template)
        stack.callback(llm.shutdown)
        return LocalBackend(llm, {"max_tokens": MAX_TOKENS} | settings)
    from radixkv.cli.chat_backends import ServerBackend
    from radixkv.cli.server_client import ServerClient

    return ServerBackend(stack.enter_context(ServerClient(url, api_key(args))), model, settings)


def _served_model(key: str | None) -> str | None:
    """Returns the model of the server at the default address, None without one, and says which it is."""
    from radixkv.cli.chat_backends import first_model
    from radixkv.cli.server_client import ServerClient, ServerError

    try:
        with ServerClient(DEFAULT_URL, key) as server:
            model = first_model(server, limit_s=PROBE_LIMIT_S)
    except ServerError as error:
        print(f"radixkv: {error}; running the model in this process", file=sys.stderr)
    except ConfigError:
        print(f"radixkv: no server at {DEFAULT_URL}; running the model in this process", file=sys.stderr)
    else:
        print(f"radixkv: chatting with {model} at {DEFAULT_URL}", file=sys.stderr)
        return model
    return None


class Conversation:
    """A conversation and its dialogue in the terminal.

    Args:
        backend: generates the answers.
        system: the system prompt.
    """

    def __init__(self, backend: ChatBackend, system: str | None) -> None:
        self._backend = backend
        self._initial_messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._initial_messages)

    def run(self) -> None:
        """Reads and answers lines until ``/exit`` or the end of input."""
        for line in _lines():
            match line:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/clear":
                    self._messages = list(self._initial_messages)
                case _ if line.startswith("/"):
                    print(f"unknown command; {HELP}")
                case _ if not is_utf8(line):
                    print("that line is not UTF-8 text")
                case _:
                    self._say(line)

    def _say(self, line: str) -> None:
        """Runs one turn. A failed turn is not kept in the conversation; an interrupted one is, if it has text."""
        messages = [*self._messages, {"role": "user", "content": line}]
        started = time.monotonic()
        pieces: list[str] = []
        turn: TurnStats | None = None
        try:
            with closing(self._backend.answer(messages)) as answer:
                nonempty = (piece for piece in answer if piece)
                with Progress("waiting for the first token", enabled=sys.stdout.isatty(), stream=sys.stdout):
                    first = next(nonempty)
                for piece in itertools.chain([first], nonempty):
                    if isinstance(piece, str):
                        pieces.append(piece)
                        print(piece, end="", flush=True)
                    else:
                        turn = piece
        except KeyboardInterrupt:
            turn = None
        except RadixKVError as error:
            print(f"\nerror: {' '.join(str(error).split())}")
            return
        print(f"\n[{_summary(turn, time.monotonic() - started)}]")
        text = "".join(pieces)
        if text or turn is not None:
            self._messages = [*messages, {"role": "assistant", "content": text}]


def _summary(turn: TurnStats | None, seconds: float) -> str:
    if turn is None:
        return f"interrupted after {seconds:.1f} s"
    cached = "an unknown part" if turn.n_cached_tokens is None else str(turn.n_cached_tokens)
    end = ", cut off by max_tokens" if turn.finish_reason == "length" else ""
    return (
        f"{cached} of {turn.n_prompt_tokens} prompt tokens from the cache, "
        f"{turn.n_new_tokens} new tokens, {seconds:.1f} s{end}"
    )


def _lines() -> Iterator[str]:
    """Yields the lines of the input; on a terminal Ctrl-C discards the current line."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    importlib.import_module("readline")  # gives input() line editing

    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        yield line.strip()
