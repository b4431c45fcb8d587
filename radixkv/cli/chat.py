"""``radixkv chat``: a conversation in the terminal that shows what each turn reused."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from radixkv.cli.arguments import Parser, add_engine_flags, engine_config, engine_flags
from radixkv.cli.offline import add_sampling_flags, is_text, local_llm, sampling_settings
from radixkv.errors import RadixKVError

if TYPE_CHECKING:
    from radixkv.cli.chat_backends import Message, Speaker, Turn

MAX_TOKENS = 512
"""Of an answer of this process, unless ``--max-tokens`` says otherwise."""

HELP = "/clear begins anew, /exit or end of input leaves, Ctrl-C ends an answer"


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal, and see what each turn reused",
        description="Talk to a model in this process, or to a server. After each answer a line says how much of "
        f"the prompt came from the cache. {HELP}.",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--chat-template", metavar="FILE", help="a chat template instead of the tokenizer's own")
    parser.add_argument("--base-url", metavar="URL", help="a running OpenAI-compatible server answers")
    parser.add_argument("--api-key", metavar="KEY", help="the key that this server asks for")
    add_sampling_flags(parser)
    add_engine_flags(parser, has_queue=False)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Talks until the input ends; the exit code."""
    if args.system is not None and not is_text(args.system):
        args.parser.error("the system prompt is not UTF-8 text")
    settings = sampling_settings(args)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text shall not end the session
    with ExitStack() as stack:
        speaker = _speaker(args, settings, stack)
        if sys.stdin.isatty():
            print(f"({HELP})")
        Conversation(speaker, args.system).run()
    return 0


def _speaker(args: argparse.Namespace, settings: dict[str, Any], stack: ExitStack) -> Speaker:
    parser: Parser = args.parser
    config = engine_config(args, model=args.positional_model)
    if args.base_url is None:
        if args.api_key is not None:
            parser.error("--api-key is for a running server; give its --base-url, or leave out --api-key")
        from radixkv.cli.chat_backends import LocalSpeaker

        llm = local_llm(config, chat_template=args.chat_template)
        stack.callback(llm.shutdown)
        return LocalSpeaker(llm, {"max_tokens": MAX_TOKENS} | settings)
    flags = [flag for flag in engine_flags(config) if not flag.startswith("--model=")]
    if args.chat_template is not None:
        flags.append("--chat-template")
    if flags:
        parser.error(f"{' '.join(flags)} cannot change the server at --base-url, which is running; leave it out")
    from radixkv.cli.chat_backends import RemoteSpeaker
    from radixkv.cli.server_client import Server

    server = stack.enter_context(Server(args.base_url, args.api_key))
    return RemoteSpeaker(server, args.positional_model or args.model, settings)


class Conversation:
    """What was said, and the dialogue with the terminal.

    Args:
        speaker: answers.
        system: the system prompt.
    """

    def __init__(self, speaker: Speaker, system: str | None) -> None:
        self._speaker = speaker
        self._beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)

    def run(self) -> None:
        """Until ``/exit`` or the end of input."""
        for line in _lines():
            match line:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/clear":
                    self._messages = list(self._beginning)
                case _ if line.startswith("/"):
                    print(f"no such command; {HELP}")
                case _ if not is_text(line):
                    print("that line is not UTF-8 text")
                case _:
                    self._say(line)

    def _say(self, line: str) -> None:
        """One turn. What an error ends is not part of the conversation; what Ctrl-C ends is, if it has text."""
        messages = [*self._messages, {"role": "user", "content": line}]
        begun = time.monotonic()
        pieces: list[str] = []
        turn: Turn | None = None
        try:
            with closing(self._speaker.answer(messages)) as answer:
                for piece in answer:
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
        print(f"\n[{_summary(turn, time.monotonic() - begun)}]")
        text = "".join(pieces)
        if text or turn is not None:
            self._messages = [*messages, {"role": "assistant", "content": text}]


def _summary(turn: Turn | None, seconds: float) -> str:
    if turn is None:
        return f"interrupted after {seconds:.1f} s"
    cached = "an unknown part" if turn.n_cached_tokens is None else str(turn.n_cached_tokens)
    end = ", cut off by max_tokens" if turn.finish_reason == "length" else ""
    return (
        f"{cached} of {turn.n_prompt_tokens} prompt tokens from the cache, "
        f"{turn.n_new_tokens} new tokens, {seconds:.1f} s{end}"
    )


def _lines() -> Iterator[str]:
    """What is typed, line by line; Ctrl-C drops what is on the line."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  # gives input() a line that can be edited

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
