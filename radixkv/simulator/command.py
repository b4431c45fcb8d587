"""``radixkv simulate``: cache hit rates of recorded traffic by cache capacity."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.arguments import Parser, whole_number
from radixkv.terminal_progress import Progress

if TYPE_CHECKING:
    from radixkv.simulator.replay import Policy
    from radixkv.simulator.simulation import Result

POLICIES: tuple[Policy, ...] = ("lru", "oracle")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_CAPACITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmg]?)")

EXAMPLES = """\
examples:
  radixkv simulate --trace mooncake.jsonl --capacity 0.5M,5M,15M
  radixkv simulate --trace requests.jsonl --tokenizer ./my-model --capacity 100k,1M --policy lru
  radixkv simulate --trace token_ids.jsonl --capacity 1M --model ./my-model --plot pictures
"""


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command, with ``summary`` as its help."""
    parser = commands.add_parser(
        "simulate",
        help=summary,
        description="Replay recorded requests through the production scheduler, page pool and radix tree,\n"
        "without a model, and print hit rate and evictions by cache capacity.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--trace",
        type=_trace,
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
        type=_capacities,
        required=True,
        metavar="TOKENS,...",
        help="cache capacities in tokens, such as 0.5M,5M,15M or 512k; an infinite one is always added",
    )
    cache.add_argument(
        "--policy",
        type=_policies,
        metavar="NAME,...",
        help="eviction policies: lru evicts the least recently used page, oracle the page whose next use is "
        "furthest in the future (default: both; only lru with --concurrency above 1)",
    )
    cache.add_argument(
        "--page-size",
        "--block-size",
        type=whole_number,
        metavar="TOKENS",
        help="tokens per page (default: 16; 512 for a trace with --rule blocks)",
    )
    cache.add_argument(
        "--rule",
        choices=("blocks", "engine"),
        help="what counts as a hit. blocks: even a partial last block of a trace is shared, and the request in "
        "flight needs no capacity. engine, as in radixkv: only whole pages are shared, at least one token of each "
        "prompt is computed, and running requests take their pages from the capacity (default: blocks for traces "
        "with one request in flight, else engine)",
    )
    cache.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=whole_number,
        default=1,
        metavar="REQUESTS",
        help="number of requests in flight, scheduled as by the server (default: 1)",
    )
    cache.add_argument(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        type=whole_number,
        metavar="TOKENS",
        help="maximum number of tokens in a step, with --concurrency above 1 (default: 8192)",
    )
    size = cache.add_mutually_exclusive_group()
    size.add_argument(
        "--model", metavar="MODEL", help="also show capacities in bytes, for the 16-bit KV pages of this model"
    )
    size.add_argument(
        "--kv-bytes-per-token",
        type=whole_number,
        metavar="BYTES",
        help="also show capacities in bytes, for KV of this size per token, such as 131072 for Llama 3 8B",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-file", type=Path, metavar="FILE", help="append one JSON line per result to this file"
    )
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FOLDER",
        help="write the curve of hit rates into this folder, as an HTML page and a PNG",
    )
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table, each line as soon as its replay is done; returns the exit code."""
    parser: Parser = args.parser
    for name in ("page_size", "kv_bytes_per_token", "concurrency", "max_num_batched_tokens"):
        value = vars(args)[name]
        if value is not None and value < 1:
            parser.error(f"{name} {value} must be at least 1")
    is_serial = args.concurrency == 1
    if is_serial and args.max_num_batched_tokens is not None:
        parser.error(
            "--max-num-batched-tokens needs several requests in flight; give --concurrency, or leave it out"
        )
    if not is_serial and "oracle" in (args.policy or ()):
        parser.error("--policy oracle supports only one request in flight; use --policy lru with --concurrency")
    policies = args.policy or (POLICIES if is_serial else ("lru",))
    from radixkv.bench.output import check_outputs
    from radixkv.simulator.concurrent_replay import MAX_NUM_BATCHED_TOKENS
    from radixkv.simulator.kv_size import kv_bytes_per_token
    from radixkv.simulator.recording import read_recording
    from radixkv.simulator.result_table import cells, columns, format_row, remarks, title
    from radixkv.simulator.simulation import simulate

    check_outputs(args.output_file, args.plot)
    n_bytes = args.kv_bytes_per_token if args.model is None else kv_bytes_per_token(args.model)
    with Progress(f"reading {args.trace}"):
        recording = read_recording(
            args.trace,
            page_size=args.page_size,
            rule=args.rule if is_serial else args.rule or "engine",
            tokenizer=args.tokenizer,
            conversations=args.conversations,
            skip_bad_lines=args.skip_bad_lines,
            compact_pages=is_serial,
        )
    replays = simulate(
        recording,
        args.capacity,
        policies,
        n_bytes,
        concurrency=args.concurrency,
        max_num_batched_tokens=args.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS,
        show_progress=True,
    )
    provenance = _provenance(args)
    has_bytes = n_bytes is not None
    print(title(recording, args.concurrency))
    print(format_row([column.title for column in columns(has_bytes)], has_bytes), flush=True)
    results: list[Result] = []
    for result in replays:
        print(format_row(cells(result), has_bytes), flush=True)
        _save_result(args, result, provenance)
        results.append(result)
    for remark in remarks(results, recording):
        print(remark)
    if args.plot is not None:
        from radixkv.simulator.hit_rate_plot import plot

        with Progress("drawing the plot"):
            plot(results, recording, args.plot)
        print(f"plots: {args.plot / 'index.html'}")
    return 0


def _provenance(args: argparse.Namespace) -> dict[str, object]:
    """Returns the provenance fields of the JSON lines; none without an output file."""
    if args.output_file is None:
        return {}
    from radixkv.bench.environment import provenance

    return provenance()


def _save_result(args: argparse.Namespace, result: Result, provenance: dict[str, object]) -> None:
    """Appends a JSON line at once, because later replays may take long or be interrupted."""
    if args.output_file is None:
        return
    import msgspec

    from radixkv.bench.output import append_lines

    record = {"bench": "simulate", **msgspec.structs.asdict(result), **provenance}
    append_lines(args.output_file, msgspec.json.encode(record) + b"\n")


def _trace(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError(
            "the trace is read twice, so it cannot be standard input; save it as a file"
        )
    return Path(text)


def _capacities(text: str) -> list[int]:
    return list(dict.fromkeys(_capacity(part) for part in text.split(",")))


def _capacity(text: str) -> int:
    match = _CAPACITY.fullmatch(text.strip().lower())
    n_tokens = Fraction(match[1]) * _UNITS[match[2]] if match is not None else Fraction(0)
    if n_tokens < 1 or n_tokens.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of tokens; write 500000, 512k or 0.5M")
    return int(n_tokens)


def _policies(text: str) -> tuple[Policy, ...]:
    named: list[Policy] = []
    for name in text.split(","):
        policy = next((policy for policy in POLICIES if policy == name.strip().lower()), None)
        if policy is None:
            raise argparse.ArgumentTypeError(f"{name!r} is not a policy; use lru, oracle or lru,oracle")
        named.append(policy)
    return tuple(dict.fromkeys(named))
