"""``radixkv doctor``: why the prompts of a running server were not cached."""

from __future__ import annotations

import argparse

import msgspec

from radixkv.settings.arguments import Parser
from radixkv.settings.client_flags import add_client_flags, api_key
from radixkv.terminal import Progress
from radixkv.text.printable import printable


class Misses(msgspec.Struct):
    """Misses that end at one place, or for one reason."""

    text: str


class HistoryAnswers(msgspec.Struct):
    """Earlier answers in prompts."""

    otherwise: int
    """Answers that were not as the model wrote them."""
    text: str


class PauseKind(msgspec.Struct):
    """Pauses after calls of the same tools, or until a user goes on."""

    text: str


class Pauses(msgspec.Struct):
    """Chats that pause between two turns."""

    open: int
    returns: int
    given_up: int
    text: str
    kinds: list[PauseKind]


class DoctorResponse(msgspec.Struct):
    """The response of ``/cache/doctor``."""

    text: str
    misses: list[Misses]
    history_answers: HistoryAnswers | None = None
    """None if the server keeps no answers."""
    pauses: Pauses | None = None
    """None if the server learns no pauses, or as ``pauses_missing`` says."""
    pauses_missing: str = ""
    """Why the server cannot say what it has learnt."""


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "doctor",
        help=summary,
        description="Ask a running radixkv server where the cached parts of its prompts have ended since it was "
        "started, why, and how many tokens were computed for that.",
    )
    add_client_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report and returns the exit code."""
    from radixkv.cli.server_client import ServerClient

    with Progress(f"asking {args.base_url}"), ServerClient(args.base_url, api_key(args)) as client:
        report = client.get("/cache/doctor", DoctorResponse)
    lines = [report.text, *(f"  {misses.text}" for misses in report.misses)]
    if report.history_answers is not None and report.history_answers.otherwise:
        lines.append(report.history_answers.text)
    pauses = report.pauses
    if pauses is not None and (pauses.open or pauses.returns or pauses.given_up):
        lines += [pauses.text, *(f"  {kind.text}" for kind in pauses.kinds)]
    if report.pauses_missing:
        lines.append(report.pauses_missing)
    print("\n".join(map(printable, lines)))  # models name tools
    return 0
