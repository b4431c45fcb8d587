"""Workload and load flags of ``radixkv bench``."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from radixkv.settings.arguments import Parser, count, number, whole_number

WORKLOADS = (
    "agents",
    "tool-pauses",
    "chat",
    "fewshot",
    "judge",
    "long-document-qa",
    "multiturn",
    "pressure",
    "rag",
    "self-consistency",
    "trace",
    "tree-of-thought",
    "unshared",
)
"""The workloads that are shipped with the package."""

COUNT_FLAGS = (
    ("--num-prompts", "number of requests, or of groups of requests"),
    ("--num-sessions", "number of sessions with several requests each"),
    ("--num-turns", "number of turns in each session"),
    ("--num-shots", "number of worked examples in each prompt"),
    ("--num-samples", "number of answers to each prompt"),
    ("--num-documents", "number of documents that questions are about"),
    ("--num-questions", "number of questions about each document, or in each turn about it"),
    ("--num-chunks", "number of documents that a search finds for each question"),
    ("--num-facts", "number of facts in each document"),
    ("--width", "number of branches of each thought in a tree of thought"),
    ("--depth", "number of levels of a tree of thought"),
    ("--beam", "number of thoughts kept at each level of a tree of thought, at most --width"),
    ("--output-len", "number of tokens of each answer"),
    ("--block-len", "number of tokens for each 512-token block of a trace; a smaller number shortens all requests"),
    ("--max-context", "maximum number of tokens of a trace's prompt plus its answer"),
    ("--max-concurrency", "maximum number of requests in flight; without it an open loop has no limit"),
)
"""The flags of the counts among the parameters of workloads, with their help."""

OVERRIDES = (*(flag[2:].replace("-", "_") for flag, _ in COUNT_FLAGS), "too_long", "history")
"""The parameters of workloads that have a flag."""

MAX_WARMUP_REQUESTS = 1_000_000
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
MAX_REQUEST_TIMEOUT_S = 1e6


def add_load_flags(load: argparse._ArgumentGroup) -> None:
    """Adds the flags of the workload and the load."""
    load.add_argument(
        "--workload",
        default="fewshot",
        metavar="NAME",
        help=f"the workload: {', '.join(WORKLOADS)}, or a TOML file (default: fewshot)",
    )
    for flag, description in COUNT_FLAGS:
        load.add_argument(flag, type=count, metavar="COUNT", help=f"{description} (default: the workload's)")
    load.add_argument(
        "--too-long",
        choices=("skip", "scale"),
        help="what to do with a trace's requests beyond --max-context: skip them, or scale the blocks of all "
        "requests down until they fit (default: the workload's)",
    )
    load.add_argument(
        "--history",
        choices=("model", "recorded"),
        help="whose answers later prompts of a chat have: the model's, or recorded ones, so that every server gets "
        "the same prompts (default: the workload's)",
    )
    load.add_argument(
        "--request-rate",
        type=number,
        metavar="RATE",
        help="sessions that start per second, as a Poisson process independent of the server's progress (open "
        "loop); inf starts as many at once as --max-concurrency allows (default: the data set's own times, or inf "
        "if it has none)",
    )
    load.add_argument(
        "--speed",
        type=number,
        metavar="FACTOR",
        help="replay the data set's own times this many times as fast (default: 1)",
    )
    load.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="data set with real texts, instead of synthetic ones",
    )
    load.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="skip and count malformed lines of --dataset-path instead of failing",
    )
    load.add_argument(
        "--prompt-form",
        choices=("text", "tokens"),
        default="text",
        help="send prompts as text, or as token ids encoded with --tokenizer (default: text)",
    )
    load.add_argument(
        "--plain-requests",
        action="store_true",
        help="send only OpenAI's fields, for servers that reject others; answers may then end early, and their "
        "token ids are unknown",
    )
    load.add_argument(
        "--seed",
        type=whole_number,
        default=0,
        metavar="NUMBER",
        help="seed of synthetic texts, sampling and arrival times (default: 0)",
    )
    load.add_argument(
        "--warmup-requests",
        type=count,
        default=2,
        metavar="COUNT",
        help="number of unrelated requests to send before the measurement (default: %(default)s)",
    )
    load.add_argument(
        "--request-timeout",
        type=number,
        default=600.0,
        metavar="SECONDS",
        help="a request fails if the server sends nothing for this long; if no request received anything in that "
        "time, the run ends (default: %(default)g)",
    )
    load.add_argument(
        "--goodput",
        nargs="+",
        action="extend",
        type=_limit,
        default=[],
        metavar="NAME:MS",
        help="count the requests within these latency limits in milliseconds, such as ttft:200 tpot:50 e2el:3000",
    )


def add_output_flags(group: argparse._ArgumentGroup, saved: str, drawn: str) -> None:
    """Adds the flags of the files that a command writes: what a JSON line is of, and what it draws."""
    group.add_argument(
        "--output-file", type=Path, metavar="FILE", help=f"append one JSON line per {saved} to this file"
    )
    group.add_argument("--plot", type=Path, metavar="FOLDER", help=f"write {drawn}")


def check_load_ranges(args: argparse.Namespace) -> None:
    """Rejects numbers that are out of range for every workload, as wrong usage."""
    parser: Parser = args.parser
    for name, is_in_range, limit in (
        ("seed", args.seed >= 0, "at least 0"),
        (
            "warmup_requests",
            0 <= args.warmup_requests <= MAX_WARMUP_REQUESTS,
            f"between 0 and {MAX_WARMUP_REQUESTS}",
        ),
        ("request_rate", args.request_rate is None or args.request_rate > 0, "above 0"),
        (
            "request_timeout",
            0 < args.request_timeout <= MAX_REQUEST_TIMEOUT_S,
            f"above 0 s and at most {MAX_REQUEST_TIMEOUT_S:g}",
        ),
        ("speed", args.speed is None or 0 < args.speed < math.inf, "above 0 and finite"),
    ):
        if not is_in_range:
            parser.error(f"{name} {vars(args)[name]} must be {limit}")


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in GOODPUT_NAMES:
        raise argparse.ArgumentTypeError(
            f"{text!r} does not start with one of {', '.join(GOODPUT_NAMES)}; write for example ttft:200"
        )
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not limit > 0:  # also catches NaN
        raise argparse.ArgumentTypeError(f"{text!r} has no limit above 0 ms; write for example {name}:200")
    return name, limit
