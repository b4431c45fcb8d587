"""``radixkv simulate``: what a cache of some capacity would have found of recorded traffic."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.cli.arguments import Parser, whole_number

if TYPE_CHECKING:
    from radixkv.simulator.replay import Policy
    from radixkv.simulator.simulation import Result

POLICIES: tuple[Policy, ...] = ("lru", "oracle")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_CAPACITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kmg]?)")

EXAMPLES = """\
examples:
  radixkv simulate --trace mooncake.jsonl --capacity 0.5M,5M,15M
  radixkv simulate --trace chats.jsonl --tokenizer ./my-model --capacity 100k,1M --policy lru
  radixkv simulate --trace requests.jsonl --capacity 1M --model ./my-model --plot pictures
"""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "simulate",
        help="what caches of other sizes would find of recorded traffic",
        description="Replay recorded requests through the production scheduler, page pool and radix tree,\n"
        "without a model: hit rate and evictions by capacity.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--trace",
        type=_trace,
        required=True,
        metavar="FILE",
        help="JSON lines: a Mooncake trace, prompt_token_ids, or conversations (OpenAI messages, ShareGPT)",
    )
    traffic.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="of conversations: a folder, a hub name or 'tiny', with a chat template",
    )
    traffic.add_argument(
        "--skip-bad-lines", action="store_true", help="count malformed lines instead of refusing them"
    )
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--capacity",
        type=_capacities,
        required=True,
        metavar="TOKENS,...",
        help="such as 0.5M,5M,15M or 512k; an infinite one is always added",
    )
    cache.add_argument(
        "--policy",
        type=_policies,
        metavar="NAME,...",
        help="lru evicts what was used least recently, oracle what will be used last or never (default: both; lru "
        "with several requests in flight)",
    )
    cache.add_argument(
        "--page-size",
        "--block-size",
        type=whole_number,
        metavar="TOKENS",
        help="tokens a page (default: 16; of a trace by the rule blocks 512)",
    )
    cache.add_argument(
        "--rule",
        choices=("blocks", "engine"),
        help="blocks: a trace's last block is shared like any other, and the request in flight has its own room; "
        "engine: only whole pages are shared, a token of each prompt is computed, and requests take their pages "
        "from the capacity, as in radixkv (default: blocks for traces, with one request in flight)",
    )
    cache.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=whole_number,
        default=1,
        metavar="REQUESTS",
        help="in flight at once, ranked and admitted as the server does (default: 1)",
    )
    cache.add_argument(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        type=whole_number,
        metavar="TOKENS",
        help="most tokens a step, with several requests in flight (default: 8192)",
    )
    size = cache.add_mutually_exclusive_group()
    size.add_argument("--model", metavar="MODEL", help="a model whose KV pages, at 16 bits, give figures in bytes")
    size.add_argument(
        "--kv-bytes-per-token", type=whole_number, metavar="BYTES", help="the same, such as 131072 for Llama 3 8B"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output-file", type=Path, metavar="FILE", help="append a JSON line a result")
    output.add_argument("--plot", type=Path, metavar="FOLDER", help="write the curve, as a page of HTML and a PNG")
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table, line by line as the replays end."""
    parser: Parser = args.parser
    for name in ("page_size", "kv_bytes_per_token", "concurrency", "max_num_batched_tokens"):
        value = vars(args)[name]
        if value is not None and value < 1:
            parser.error(f"{name} {value} must be at least 1")
    is_alone = args.concurrency == 1
    if is_alone and args.max_num_batched_tokens is not None:
        parser.error(
            "--max-num-batched-tokens is for several requests in flight; give --concurrency, or leave it out"
        )
    if not is_alone and "oracle" in (args.policy or ()):
        parser.error("the oracle knows the future of one request in flight; use --policy lru with --concurrency")
    policies = args.policy or (POLICIES if is_alone else ("lru",))
    from radixkv.bench.output import check_outputs
    from radixkv.simulator.concurrent_replay import MAX_NUM_BATCHED_TOKENS
    from radixkv.simulator.kv_size import kv_bytes_per_token
    from radixkv.simulator.recording import read_recording
    from radixkv.simulator.result_table import cells, columns, line, remarks, title
    from radixkv.simulator.simulation import simulate

    check_outputs(args.output_file, args.plot)
    n_bytes = args.kv_bytes_per_token if args.model is None else kv_bytes_per_token(args.model)
    recording = read_recording(
        args.trace,
        page_size=args.page_size,
        rule=args.rule if is_alone else args.rule or "engine",
        tokenizer=args.tokenizer,
        skip_bad_lines=args.skip_bad_lines,
        abbreviates=is_alone,
    )
    replays = simulate(
        recording,
        args.capacity,
        policies,
        n_bytes,
        concurrency=args.concurrency,
        max_num_batched_tokens=args.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS,
    )
    origin = _origin(args)
    has_bytes = n_bytes is not None
    print(title(recording, args.concurrency))
    print(line([column.head for column in columns(has_bytes)], has_bytes), flush=True)
    results: list[Result] = []
    for result in replays:
        print(line(cells(result), has_bytes), flush=True)
        _keep(args, result, origin)
        results.append(result)
    for remark in remarks(results, recording):
        print(remark)
    if args.plot is not None:
        from radixkv.simulator.hit_rate_plot import plot

        plot(results, recording, args.plot)
        print(f"pictures: {args.plot / 'index.html'}")
    return 0


def _origin(args: argparse.Namespace) -> dict[str, object]:
    """Of the lines, if there are to be any."""
    if args.output_file is None:
        return {}
    from radixkv.bench.environment import origin

    return origin()


def _keep(args: argparse.Namespace, result: Result, origin: dict[str, object]) -> None:
    """Appends a line at once: later replays may take long, or be interrupted."""
    if args.output_file is None:
        return
    import msgspec

    from radixkv.bench.output import append_lines

    known = {"bench": "simulate", **msgspec.structs.asdict(result), **origin}
    append_lines(args.output_file, msgspec.json.encode(known) + b"\n")


def _trace(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError("standard input cannot be read twice; save the trace as a file first")
    return Path(text)


def _capacities(text: str) -> list[int]:
    return list(dict.fromkeys(_capacity(each) for each in text.split(",")))


def _capacity(text: str) -> int:
    found = _CAPACITY.fullmatch(text.strip().lower())
    n_tokens = Fraction(found[1]) * _UNITS[found[2]] if found is not None else Fraction(0)
    if n_tokens < 1 or n_tokens.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of tokens; write 500000, 512k or 0.5M")
    return int(n_tokens)


def _policies(text: str) -> tuple[Policy, ...]:
    named: list[Policy] = []
    for name in text.split(","):
        policy = next((each for each in POLICIES if each == name.strip().lower()), None)
        if policy is None:
            raise argparse.ArgumentTypeError(f"{name!r} is no policy; use lru, oracle or lru,oracle")
        named.append(policy)
    return tuple(dict.fromkeys(named))
