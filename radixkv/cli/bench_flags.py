"""Flags of ``radixkv bench`` that say what is asked, and how fast."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from radixkv.cli.arguments import Parser, number, whole_number

WORKLOADS = (
    "agents",
    "chat",
    "fewshot",
    "judge",
    "long-document-qa",
    "multiturn",
    "self-consistency",
    "trace",
    "tree-of-thought",
    "unshared",
)
"""Those that are shipped."""

COUNTS = (
    ("--num-prompts", "requests or groups of them"),
    ("--num-sessions", "clients that ask more than once"),
    ("--num-turns", "turns of each"),
    ("--num-shots", "worked examples a prompt"),
    ("--num-samples", "answers to each prompt"),
    ("--num-documents", "texts that are asked about"),
    ("--num-questions", "questions about each"),
    ("--num-facts", "facts in each"),
    ("--width", "branches of each thought"),
    ("--depth", "thoughts one after another"),
    ("--beam", "thoughts that are kept of each depth, at most the width"),
    ("--output-len", "tokens of each answer"),
    ("--block-len", "tokens that a trace's block of 512 becomes; fewer make all lengths smaller"),
    ("--max-context", "most tokens of a trace's prompt and its answer"),
    ("--max-concurrency", "most requests in flight at once; in an open loop there is no limit without it"),
)
"""What workloads count, as ``WorkloadChanges`` has it."""

MAX_WARMUP_REQUESTS = 1_000_000
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
MAX_REQUEST_TIMEOUT_S = 1e6


def add_load_flags(load: argparse._ArgumentGroup) -> None:
    """What is asked, and how fast."""
    load.add_argument(
        "--workload",
        default="fewshot",
        metavar="NAME",
        help=f"{', '.join(WORKLOADS)}, or a TOML file (default: fewshot)",
    )
    for flag, what in COUNTS:
        load.add_argument(flag, type=whole_number, metavar="COUNT", help=f"{what} (default: the workload's)")
    load.add_argument(
        "--too-long",
        choices=("skip", "scale"),
        help="requests beyond --max-context are left out, or the blocks of all become shorter until these fit "
        "(default: the workload's)",
    )
    load.add_argument(
        "--request-rate",
        type=number,
        metavar="RATE",
        help="sessions that begin in a second, Poisson, no matter how far the server has come; inf: as many at "
        "once as --max-concurrency allows (default: by the data set's own clock; inf if it has none)",
    )
    load.add_argument(
        "--speed", type=number, metavar="FACTOR", help="how much faster than the data set's own clock (default: 1)"
    )
    load.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="real texts instead of made ones",
    )
    load.add_argument(
        "--skip-bad-lines", action="store_true", help="count lines of the data set that cannot be read, and go on"
    )
    load.add_argument(
        "--prompt-form",
        choices=("text", "tokens"),
        default="text",
        help="send prompts as they are, or as token ids of --tokenizer (default: text)",
    )
    load.add_argument(
        "--plain-requests",
        action="store_true",
        help="send only fields that are OpenAI's, to servers that refuse others: answers may then end early, and "
        "their token ids are not known",
    )
    load.add_argument(
        "--seed",
        type=whole_number,
        default=0,
        metavar="NUMBER",
        help="of the made texts, of sampling and of arrivals (default: 0)",
    )
    load.add_argument(
        "--warmup-requests",
        type=whole_number,
        default=2,
        metavar="COUNT",
        help="unrelated requests first (default: %(default)s)",
    )
    load.add_argument(
        "--request-timeout",
        type=number,
        default=600.0,
        metavar="SECONDS",
        help="a request has failed if the server sends nothing for so long; if nobody got anything meanwhile, the "
        "server hangs, and the run ends (default: %(default)g)",
    )
    load.add_argument(
        "--goodput",
        nargs="+",
        action="extend",
        type=_limit,
        default=[],
        metavar="NAME:MS",
        help="count requests that keep these limits, such as ttft:200 tpot:50 e2el:3000",
    )


def check_load_ranges(args: argparse.Namespace) -> None:
    """Numbers that no workload could take end as wrong usage."""
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
        raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(GOODPUT_NAMES)}; write ttft:200")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not limit > 0:  # also catches NaN
        raise argparse.ArgumentTypeError(f"{text!r} has no limit above 0 ms; write {name}:200")
    return name, limit
