"""``radixkv simulate``: cache hit rates of recorded traffic by cache capacity, and what drafts would bring."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from radixkv.lab.bench.flags import add_output_flags
from radixkv.lab.simulator.flag_values import parse_capacities, parse_names, parse_server_counts, parse_trace
from radixkv.lab.simulator.timed_flags import (
    TIME_SETTINGS,
    add_timed_flags,
    arrival_settings,
    check_range,
    check_timed_flags,
    is_timed,
    server,
    server_policies,
)
from radixkv.settings.arguments import Parser, add_flags, byte_size, count, number
from radixkv.settings.config import SchedulerConfig
from radixkv.settings.setting import settings_of
from radixkv.terminal import Progress, Table, wrapped

if TYPE_CHECKING:
    from radixkv.lab.simulator.caches import Policy
    from radixkv.lab.simulator.routers import Routing
    from radixkv.lab.simulator.simulation import Result

POLICIES: tuple[Policy, ...] = ("lru", "lfuda", "adaptive", "oracle")
DEFAULT_POLICIES: tuple[Policy, ...] = ("lru", "oracle")
ROUTINGS: tuple[Routing, ...] = ("round-robin", "prefix", "events")
"""What routers before several servers may know."""
BYTES_PER_VALUE = 2
"""Size of a bfloat16 or float16 value."""

_FINITE = (
    *("eviction_policy", "ghost_capacity", "ends_known", "load_us_per_token", "fetch_us_per_token"),
    *("compute_us_per_token", "output_len", "num_states", "servers", "routing", "events_delay", "replicas"),
    *TIME_SETTINGS,
)
"""Flags that need ``--capacity``."""

EXAMPLES = """\
examples:
  radixkv simulate --trace mooncake.jsonl --capacity 0.5M,5M,15M
  radixkv simulate --trace mooncake.jsonl --capacity 5M --eviction-policy lru,adaptive --ends-known 0.5
  radixkv simulate --trace mooncake.jsonl --capacity device=0.5M,host=5M --eviction-policy lru
  radixkv simulate --trace mooncake.jsonl --capacity device=0.5M,host=5M,disk=50M --fetch-us-per-token 5.5
  radixkv simulate --trace mooncake.jsonl --capacity 1.5M --servers 4,16 --routing round-robin,prefix
  radixkv simulate --trace mooncake.jsonl --capacity 1.5M --replicas 2 --concurrency 64
  radixkv simulate --trace mooncake.jsonl --capacity device=0.9M,host=4M --admission expected --learn-pauses
  radixkv simulate --trace agents.jsonl --tokenizer tiny --capacity 400k --learn-pauses --request-rate 0.5
  radixkv simulate --trace requests.jsonl --tokenizer ./my-model --capacity 100k,1M --eviction-policy lru
  radixkv simulate --trace token_ids.jsonl --capacity 1M --model ./my-model --plot pictures
  radixkv simulate --trace chats.jsonl --tokenizer ./my-model --speculative-config '{"method": "tree"}'
"""


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command, with ``summary`` as its help."""
    parser = commands.add_parser(
        "simulate",
        help=summary,
        description="Replay recorded requests through the production scheduler, page pool and radix tree,\n"
        "without a model, and print hit rate and evictions by cache capacity. With --admission,\n"
        "--learn-pauses or --load-ahead, also what these policies of the server gain. With --speculative-config\n"
        "also print how many steps drafts would have saved the recorded answers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--trace",
        type=parse_trace,
        required=True,
        metavar="FILE",
        help="file of JSON lines: a Mooncake trace, a log of requests (prompt or messages), prompt_token_ids, or "
        "conversations (OpenAI messages with answers, ShareGPT)",
    )
    traffic.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="tokenizer of a trace with texts, for chats with a chat template: a folder, a hub name or 'tiny'",
    )
    traffic.add_argument(
        "--conversations",
        action="store_true",
        help="take every line with messages as a recorded conversation, in which each answer was a request; "
        "without this flag, a line whose last message is not the assistant's is one request",
    )
    traffic.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="skip and count malformed lines of the trace instead of failing",
    )
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--capacity",
        type=parse_capacities,
        default=[],
        metavar="TOKENS,...",
        help="cache capacities in tokens, such as 0.5M,5M,15M or 512k, in powers of 1,000 also with a "
        "capital (Ki and Mi: of 1,024); an infinite one is always added. "
        "device=0.5M,host=5M,disk=50M is one capacity with a host tier and a disk tier; another device= begins the "
        "next one",
    )
    cache.add_argument(
        "--eviction-policy",
        "--policy",
        type=partial(parse_names, known=POLICIES, what="policy"),
        metavar="NAME,...",
        help="eviction policies of device and host: lru, lfuda and adaptive are the server's; oracle evicts the "
        "page whose next use is furthest in the future (default: lru,oracle; lru with --replicas, and with "
        "--concurrency or --servers above 1)",
    )
    cache.add_argument(
        "--ghost-capacity",
        type=number,
        metavar="FACTOR",
        help="how many evicted pages adaptive remembers, as a multiple of the pages cached (default: 4)",
    )
    cache.add_argument(
        "--ends-known",
        type=number,
        default=0.0,
        metavar="SHARE",
        help="share of the requests, drawn at random, after which the cache is told which of their pages no later "
        "request uses, as if clients had closed their conversations; it evicts these first (default: 0)",
    )
    for name, work in (
        ("load", "load a token's KV from the host tier (default: 2.4, of Llama 3 8B on an H200)"),
        (
            "fetch",
            "fetch a token's KV from the disk tier into the host tier (default: 21.8, of Llama 3 8B and a disk of "
            "6 GB/s)",
        ),
        ("compute", "compute a token of a prompt (default: 21.7, of Llama 3 8B on an H200)"),
    ):
        flag = f"--{name}-us-per-token"
        cache.add_argument(flag, type=number, metavar="MICROSECONDS", help=f"time to {work}")
    cache.add_argument(
        "--page-size",
        "--block-size",
        type=count,
        metavar="TOKENS",
        help="tokens per page (default: 16; 512 for a trace with --rule blocks)",
    )
    cache.add_argument(
        "--rule",
        choices=("blocks", "engine"),
        help="what counts as a hit. blocks: even a partial last block of a trace is shared, and the request in "
        "flight needs no capacity. engine, as in radixkv: of a trace only whole pages are shared, of prompts with "
        "tokens also parts of pages; at least one token of each prompt is computed, and running requests take "
        "their pages from the capacity (default: blocks for traces with one request in flight, else engine)",
    )
    cache.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=count,
        default=1,
        metavar="REQUESTS",
        help="number of requests in flight, scheduled as by the server; with --speculative-config also that of "
        "answers in flight (default: 1)",
    )
    cache.add_argument(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        type=count,
        metavar="TOKENS",
        help="maximum number of tokens in a step, with several requests in flight (default: 8192)",
    )
    cache.add_argument(
        "--num-states",
        type=count,
        metavar="STATES",
        help="simulate a model with recurrent layers whose prefix cache keeps so many states, with several "
        "requests in flight or in virtual time, and without lower tiers (default: attention alone)",
    )
    cache.add_argument(
        "--output-len",
        type=count,
        metavar="TOKENS",
        help="length of each answer, with several requests in flight and a file that does not say it; "
        "answers take pages of the capacity, and later turns of chats find them (default: the first token ends a "
        "request)",
    )
    servers = parser.add_argument_group("servers")
    numbers = servers.add_mutually_exclusive_group()
    numbers.add_argument(
        "--replicas",
        "--data-parallel-size",
        type=parse_server_counts,
        metavar="N,...",
        help="number of replicas in one server, as of radixkv serve --data-parallel-size, each with caches of "
        "--capacity; they share the requests of --concurrency. One server with the capacity of all is shown, too",
    )
    numbers.add_argument(
        "--servers",
        type=parse_server_counts,
        default=(1,),
        metavar="N,...",
        help="number of servers behind a router, each with caches of --capacity. One server with the capacity of "
        "all of them is shown, too (default: 1)",
    )
    servers.add_argument(
        "--routing",
        type=partial(parse_names, known=ROUTINGS, what="routing"),
        metavar="NAME,...",
        help="what the router knows. round-robin: nothing; prefix: the prompts that it sent itself, and not what "
        "servers evict; events: which pages each server has, from its cache events (default: all three)",
    )
    servers.add_argument(
        "--events-delay",
        type=count,
        metavar="REQUESTS",
        help="requests that --routing events sends on before it learns what the events of one say (default: 0, as "
        "if the router asked all servers)",
    )
    add_timed_flags(parser)
    flag = "speculative_config"
    drafts = replace(
        settings_of(SchedulerConfig)[flag],
        default=None,
        help="say how many steps drafts would save recorded answers; fields as for radixkv serve, such as "
        '\'{"method": "tree"}\'',
    )
    add_flags(parser.add_argument_group("drafts"), {flag: drafts})
    size = cache.add_mutually_exclusive_group()
    size.add_argument(
        "--model", metavar="MODEL", help="also show capacities in bytes, for the 16-bit KV pages of this model"
    )
    size.add_argument(
        "--kv-bytes-per-token",
        type=byte_size,
        metavar="SIZE",
        help="also show capacities in bytes, for KV of this size per token, such as 131072 for Llama 3 8B",
    )
    curve = "the curve of hit rates into this folder, as an HTML page and a PNG"
    add_output_flags(parser.add_argument_group("output"), "result", curve)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table, each line as soon as its replay is done; returns the exit code."""
    parser: Parser = args.parser
    numbers = ("page_size", "kv_bytes_per_token", "concurrency", "max_num_seqs", "max_num_batched_tokens")
    for name in (*numbers, "output_len", "num_states"):
        value = vars(args)[name]
        if value is not None and value < 1:
            parser.error(f"{name} {value} must be at least 1")
    if not args.capacity and args.speculative_config is None:
        parser.error("the following arguments are required: --capacity")
    if not args.capacity:
        _check_flags_without_capacity(parser, args)
    check_timed_flags(parser, args)
    has_time = is_timed(args)
    is_serial = args.concurrency == 1 and args.replicas is None and not has_time
    if is_serial and args.max_num_batched_tokens is not None:
        parser.error(
            "--max-num-batched-tokens needs several requests in flight; give --concurrency, or leave it out"
        )
    if is_serial and args.output_len is not None:
        parser.error("--output-len needs several requests in flight; give --concurrency, or leave it out")
    if args.num_states is not None and is_serial:
        parser.error("--num-states needs several requests in flight; give --concurrency, or leave it out")
    n_servers = args.replicas or args.servers
    has_servers = max(n_servers) > 1
    policies = args.eviction_policy or (DEFAULT_POLICIES if is_serial and not has_servers else ("lru",))
    routings = ("replicas",) if args.replicas is not None else args.routing or ROUTINGS
    needs_future = "--eviction-policy oracle" if "oracle" in policies else "--ends-known" if args.ends_known else ""
    if not is_serial and needs_future:
        parser.error(
            f"{needs_future} supports only one request in flight, because it needs to know the order of requests; "
            "use --eviction-policy lru with --concurrency and --replicas"
        )
    _check_tier_flags(parser, args, policies)
    _check_server_flags(parser, args, routings, needs_future)
    import msgspec

    from radixkv.lab.bench.output import check_outputs, open_saver
    from radixkv.lab.simulator.answers import recorded_answers
    from radixkv.lab.simulator.caches import GHOST_CAPACITY, CostModel
    from radixkv.lab.simulator.concurrent_replay import MAX_NUM_BATCHED_TOKENS
    from radixkv.lab.simulator.recording import read_recording
    from radixkv.lab.simulator.result_table import columns, remarks, title
    from radixkv.lab.simulator.simulation import Simulation
    from radixkv.lab.simulator.timed_simulation import TimedRow, TimedSimulation
    from radixkv.lab.simulator.timed_table import timed_columns, timed_remarks, timed_title

    check_outputs(args.output_file, args.plot)
    n_bytes = args.kv_bytes_per_token if args.model is None else _kv_bytes_per_token(args.model)
    with Progress(f"reading {args.trace}"):
        recording = read_recording(
            args.trace,
            page_size=args.page_size,
            rule=args.rule if is_serial else args.rule or "engine",
            tokenizer=args.tokenizer,
            conversations=args.conversations,
            skip_bad_lines=args.skip_bad_lines,
            compact_pages=is_serial,
            reads_answers=args.speculative_config is not None,
            reads_turns=has_time,
        )
    answers = None if is_serial else recorded_answers(recording, args.output_len)
    costs = CostModel(**{name: vars(args)[name] for name in CostModel._fields if vars(args)[name] is not None})
    simulation = Simulation(
        recording,
        args.capacity,
        policies,
        n_bytes,
        ghost_capacity=GHOST_CAPACITY if args.ghost_capacity is None else args.ghost_capacity,
        ends_known=args.ends_known,
        costs=costs,
        concurrency=args.concurrency,
        max_num_batched_tokens=args.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS,
        answers=answers,
        servers=n_servers,
        routings=routings,
        events_delay=args.events_delay or 0,
        n_states=args.num_states,
        show_progress=True,
    )
    replays: Iterable[Result] = simulation
    if has_time:
        replays = TimedSimulation(
            simulation, server_policies(args), arrival_settings(args), server(args, costs, n_bytes)
        )
    save = open_saver(args.output_file, "simulate")
    tiers = {"has_host": _has_tier(args, "host"), "has_disk": _has_tier(args, "disk")}
    if has_time:
        shown = timed_columns(server_policies(args), **tiers, has_policies=len(policies) > 1)
    else:
        shown = columns(**tiers, has_bytes=n_bytes is not None, has_servers=has_servers)
    n_keys = sum(column.is_key for column in shown)
    table = Table([column.title for column in shown], [column.width for column in shown], n_keys=n_keys)
    how = f"; {timed_title(arrival_settings(args))}" if has_time else ""
    print(wrapped(title(recording, args.concurrency, args.ends_known, args.num_states) + how))
    print(table.header(), flush=True)
    results: list[Result] = []
    rows: list[list[str]] = []
    for result in replays:
        rows.append([column.cell(result) for column in shown])
        print(table.row(rows[-1]), flush=True)
        save([msgspec.structs.asdict(result)])  # at once: later replays may take long or be interrupted
        results.append(result)
    print(table.rest(rows), end="")
    timed_rows = [result for result in results if isinstance(result, TimedRow)]
    for remark in [*remarks(results, recording), *(timed_remarks(timed_rows, recording) if timed_rows else ())]:
        print(wrapped(remark))
    if args.plot is not None:
        from radixkv.lab.simulator.hit_rate_plot import plot

        with Progress("drawing the plot"):
            plot(results, recording, table.titles, rows, args.plot)
        print(f"plots: {args.plot / 'index.html'}")
    if args.speculative_config is not None:
        from radixkv.lab.simulator.draft_simulation import draft_remarks, draft_table, draft_title, simulate_drafts

        drafted = simulate_drafts(recording, args.speculative_config, concurrency=args.concurrency)
        open_saver(args.output_file, "simulate-drafts")([msgspec.structs.asdict(one) for one in drafted])
        print(f"\n{wrapped(draft_title(drafted))}\n{draft_table(drafted)}")
        for remark in draft_remarks(drafted):
            print(wrapped(remark))
    return 0


def _kv_bytes_per_token(model: str) -> int:
    """Returns the bytes of K and V of one token in all layers, in 16 bits. Reads the config only; imports torch."""
    from radixkv.checkpoints import resolve
    from radixkv.runtime.device.model_config.config import DecoderConfig

    checkpoint = resolve(model, load_format="dummy")
    config = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    return config.kv_values_per_token * BYTES_PER_VALUE


def _has_tier(args: argparse.Namespace, tier: Literal["host", "disk"]) -> bool:
    return any(capacity._asdict()[tier] is not None for capacity in args.capacity)


def _check_flags_without_capacity(parser: Parser, args: argparse.Namespace) -> None:
    """Refuses flags that change nothing in an infinite cache."""
    if args.plot is not None:
        parser.error("--plot draws hit rate by capacity; give --capacity, or leave it out")
    for name in _FINITE:
        if vars(args)[name] != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for finite caches; give --capacity, or leave it out")


def _check_tier_flags(parser: Parser, args: argparse.Namespace, policies: Sequence[Policy]) -> None:
    """Refuses values out of range, and flags that change nothing."""
    if args.num_states is not None and _has_tier(args, "host"):
        parser.error("--num-states is for the device alone; leave the host tier out, or leave --num-states out")
    if not 0 <= args.ends_known <= 1:
        parser.error(f"ends_known {args.ends_known:g} must be between 0 and 1")
    if args.ghost_capacity is not None:
        if "adaptive" not in policies:
            parser.error("--ghost-capacity is for --eviction-policy adaptive; give that, or leave it out")
        if not 0 <= args.ghost_capacity < math.inf:
            parser.error(f"ghost_capacity {args.ghost_capacity:g} must be a number of at least 0")
    for name in ("load_us_per_token", "fetch_us_per_token", "compute_us_per_token"):
        value = vars(args)[name]
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            if name == "fetch_us_per_token" and not _has_tier(args, "disk"):
                parser.error(
                    f"{flag} needs a disk tier; give --capacity device=...,host=...,disk=..., or leave it out"
                )
            sets_steps = name == "compute_us_per_token" and is_timed(args)
            if not sets_steps and not _has_tier(args, "host"):
                parser.error(f"{flag} needs a host tier; give --capacity device=...,host=..., or leave it out")
            check_range(parser, args, name)


def _check_server_flags(
    parser: Parser, args: argparse.Namespace, routings: Sequence[Routing], needs_future: str
) -> None:
    """Refuses what several servers exclude, and flags that change nothing."""
    has_servers = max(args.servers) > 1
    if args.replicas is not None and args.plot is not None:
        parser.error("--plot draws one server only; leave it out, or leave --replicas out")
    for name in ("routing", "events_delay"):
        if vars(args)[name] is not None and not has_servers:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} needs several servers; give --servers, or leave it out")
    if args.events_delay is not None:
        if "events" not in routings:
            parser.error("--events-delay is for --routing events; give that, or leave it out")
        if args.events_delay < 0:
            parser.error(f"events_delay {args.events_delay} must be at least 0")
    if not has_servers:
        return
    if args.concurrency > 1:
        parser.error("--concurrency is for one server; each of several has one request in flight, so leave it out")
    if needs_future:
        parser.error(
            f"{needs_future} supports only one server, because it needs to know which requests a server gets; "
            "leave it out, or leave --servers out"
        )
    if args.plot is not None:
        parser.error("--plot draws one server only; leave it out, or leave --servers out")
