"""The flags of ``radixkv simulate`` for replays in virtual time."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.settings.arguments import Parser, add_flags, number
from radixkv.settings.config import SchedulerConfig
from radixkv.settings.setting import settings_of

if TYPE_CHECKING:
    from radixkv.lab.simulator.caches import CostModel
    from radixkv.lab.simulator.server_policies import ServerPolicies
    from radixkv.lab.simulator.timed_replay import Server
    from radixkv.lab.simulator.timed_simulation import ArrivalSettings

_BEGIN_TIME = ("admission", "learn_pauses", "load_ahead", "speed", "request_rate")
"""Settings each of which asks for virtual time."""
_NEED_TIME = ("max_num_seqs", "step_ms", "read_us_per_token")
_NEED_RATE = ("tool_median_s", "user_median_s")
TIME_SETTINGS = (*_BEGIN_TIME, *_NEED_TIME, *_NEED_RATE)
_LEAST, _MOST = 1e-6, 1e6
"""Range of rates, medians and costs. In it, a clock of 64 bits still tells the steps of a long replay apart."""
_MAX_NUM_SEQS = 1 << 20
"""Each takes memory, also without a request."""


def add_timed_flags(parser: Parser) -> None:
    """Adds the flags."""
    group = parser.add_argument_group(
        "virtual time",
        "with one of the first five, requests arrive at their times, steps and copies take time, and a server that "
        "learns and foresees nothing is compared with one of these policies and with an oracle",
    )
    scheduler = settings_of(SchedulerConfig)
    admission = replace(
        scheduler["admission"],
        default=None,
        help="compare admission by the lengths that answers are expected to have, as of radixkv serve --admission; "
        "the oracle knows the lengths",
    )
    add_flags(group, {"admission": admission})
    group.add_argument(
        "--learn-pauses",
        action="store_true",
        help="compare a server that learns how long tools and users take between turns of chats, and keeps what "
        "is expected back; the oracle knows when each chat goes on. The prompts tell which chat a request goes on "
        "with, and recorded messages which tools an answer calls",
    )
    group.add_argument(
        "--load-ahead",
        action="store_true",
        help="compare a server that copies what waiting requests need from lower tiers before it is their turn",
    )
    group.add_argument(
        "--speed",
        type=number,
        metavar="FACTOR",
        help="replay the times of the trace (timestamp, in milliseconds) this many times as fast (default: 1)",
    )
    group.add_argument(
        "--request-rate",
        type=number,
        metavar="RATE",
        help="conversations that begin per second, as a Poisson process, in place of the times of the trace; each "
        "turn follows the answer before it after a random pause",
    )
    group.add_argument(
        "--tool-median-s",
        type=number,
        metavar="SECONDS",
        help="with --request-rate, median time of all tools, each of which has a distribution of its own as in the "
        "workload tool-pauses (default: 1)",
    )
    group.add_argument(
        "--user-median-s",
        type=number,
        metavar="SECONDS",
        help="with --request-rate, median time that users take, which is log-normal (default: 10)",
    )
    add_flags(
        group,
        {
            "max_num_seqs": replace(
                scheduler["max_num_seqs"],
                default=None,
                help="maximum number of requests that run at the same time (default: 256)",
            )
        },
    )
    group.add_argument(
        "--step-ms",
        type=number,
        metavar="MILLISECONDS",
        help="time of a step beside what its tokens take (default: 3.96, of Llama 3 8B on an H200)",
    )
    group.add_argument(
        "--read-us-per-token",
        type=number,
        metavar="MICROSECONDS",
        help="time in which a step reads a token's KV for a row of an answer (default: 0.042, of Llama 3 8B on an "
        "H200)",
    )


def is_timed(args: argparse.Namespace) -> bool:
    """Returns whether the replay is one in virtual time."""
    return any(_is_given(args, name) for name in _BEGIN_TIME)


def check_timed_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Refuses what virtual time excludes, and flags that change nothing."""
    for name in (*_NEED_TIME, *_NEED_RATE):
        if vars(args)[name] is not None and not is_timed(args):
            parser.error(
                f"{_flag(name)} is for replays in virtual time; give --speed 1 or --request-rate, or leave it out"
            )
    if not is_timed(args):
        return
    first = next(_flag(name) for name in _BEGIN_TIME if _is_given(args, name))
    excluded = {
        "--concurrency": args.concurrency > 1,
        "--servers": max(args.servers) > 1,
        "--replicas": args.replicas is not None,
        "--ends-known": args.ends_known > 0,
        "--eviction-policy oracle": "oracle" in (args.eviction_policy or ()),
        "--plot": args.plot is not None,
        "--speculative-config": args.speculative_config is not None,
    }
    for name, is_given in excluded.items():
        if is_given:
            parser.error(f"{name} is not for replays in virtual time; leave it out, or leave {first} out")
    if args.speed is not None and args.request_rate is not None:
        parser.error("--speed scales the trace's own times, which --request-rate replaces; leave one out")
    for name in _NEED_RATE:
        if vars(args)[name] is not None and args.request_rate is None:
            parser.error(f"{_flag(name)} draws pauses at random; give --request-rate, or leave it out")
    for name in ("speed", "request_rate", "step_ms", "read_us_per_token", *_NEED_RATE):
        check_range(parser, args, name)
    if args.max_num_seqs is not None and args.max_num_seqs > _MAX_NUM_SEQS:
        parser.error(f"max_num_seqs {args.max_num_seqs} must be at most {_MAX_NUM_SEQS:,}")
    if args.load_ahead and any(capacity.host is None for capacity in args.capacity):
        parser.error("--load-ahead needs a host tier; give --capacity device=...,host=..., or leave it out")


def check_range(parser: Parser, args: argparse.Namespace, name: str) -> None:
    """Refuses a rate, median or cost that is 0, negative, or of an absurd size."""
    value = vars(args)[name]
    if value is not None and not _LEAST <= value <= _MOST:
        parser.error(f"{name} {value:g} must be from {_LEAST:f} to {_MOST:,.0f}")


def server_policies(args: argparse.Namespace) -> ServerPolicies:
    """Returns the policies that are compared."""
    from radixkv.lab.simulator.server_policies import ServerPolicies

    return ServerPolicies(
        admission=args.admission or "reserved",
        pauses="learnt" if args.learn_pauses else "none",
        loads_ahead=args.load_ahead,
    )


def arrival_settings(args: argparse.Namespace) -> ArrivalSettings:
    """Returns when requests arrive."""
    from radixkv.lab.simulator.timed_simulation import ArrivalSettings

    names = ("speed", "request_rate", "tool_median_s", "user_median_s")
    return ArrivalSettings(**{name: vars(args)[name] for name in names if vars(args)[name] is not None})


def server(args: argparse.Namespace, costs: CostModel, kv_bytes_per_token: int | None) -> Server:
    """Returns how fast the server is, and its limits."""
    from radixkv.lab.simulator.step_time import H200_8B
    from radixkv.lab.simulator.timed_replay import Server

    steps = H200_8B._replace(prompt_token_s=costs.compute_us_per_token / 1e6)
    if args.step_ms is not None:
        steps = steps._replace(fixed_s=args.step_ms / 1e3)
    if args.read_us_per_token is not None:
        steps = steps._replace(read_token_s=args.read_us_per_token / 1e6)
    given = {
        "kv_bytes_per_token": kv_bytes_per_token,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    return Server(steps, **{name: value for name, value in given.items() if value is not None})


def _is_given(args: argparse.Namespace, name: str) -> bool:
    value = vars(args)[name]
    return value is not None and value is not False


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
