"""``radixkv bench paging``: memory use of paged KV compared with contiguous reservation."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from radixkv.lab.bench.flags import add_output_flags
from radixkv.settings.arguments import Parser, add_engine_flags, count, engine_config, engine_flags, whole_number
from radixkv.settings.config import EngineConfig

WORKLOADS = ("uniform-short", "variable-length", "shared-prefix", "multi-turn", "parallel-sampling")
SCHEMES = (
    *("reserve-maximum", "reserve-power-of-two", "reserve-factor", "oracle", "oracle-best-fit", "resize"),
    *("vattention", "vattention-shared", "paged", "radix"),
)
GRANULES = {"64KiB": (1 << 16, 1), "2MiB": (1 << 21, 1), "2MiB/32": (1 << 21, 32)}
"""Bytes, and layers whose K is in one tensor, by the name of the granules."""
MAX_MODEL_LEN = 2048


class Extent(NamedTuple):
    """How much a run simulates, where no flag says so."""

    pool_tokens: int
    granules: Sequence[str]
    page_sizes: Sequence[int]
    duration: str
    """On two cores that do nothing else, in words."""


SHORT = Extent(8192, ("2MiB/32",), (1, 16, 128), "about 20 seconds")
FULL = Extent(65_536, tuple(GRANULES), (1, 2, 4, 8, 16, 32, 64, 128, 256), "about 3 minutes")
"""The extent of the results in the docs."""

STUDY_FLAGS = ("--model=", "--revision=", "--tokenizer=", "--max-model-len=", "--page-size=", "--max-total-tokens=")
"""Engine flags that the study uses even without --measure; the tokenizer counts the tokens of texts."""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command to those of ``radixkv bench``."""
    parser = commands.add_parser(
        "paging",
        help="compare the memory use of paged KV with contiguous reservation",
        description="Simulate five workloads, without a model, on the engine's own page cache and on contiguous "
        "memory, and print what the memory is used for while requests wait for it. The pool has --max-total-tokens "
        f"(default: {SHORT.pool_tokens}, with --full {FULL.pool_tokens}); the longest sequence is --max-model-len "
        f"(default: {MAX_MODEL_LEN}). Without flags it takes {SHORT.duration} on two idle cores, with --full "
        f"{FULL.duration}.",
    )
    study = parser.add_argument_group("study")
    study.add_argument(
        "--full",
        action="store_true",
        help="as large a pool, and as many sizes of granules and pages, as for the results in the docs",
    )
    study.add_argument(
        "--workloads",
        type=_workloads,
        default=list(WORKLOADS),
        metavar="NAMES",
        help=f"the workloads to run, separated by commas: {', '.join(WORKLOADS)} (default: all)",
    )
    study.add_argument(
        "--schemes",
        type=_schemes,
        metavar="NAMES",
        help=f"the schemes to compare, separated by commas: {', '.join(SCHEMES)} (default: all; --measure takes "
        "those that the engine can run)",
    )
    study.add_argument(
        "--dataset-path",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="file with real lengths, instead of published distributions: problems for uniform-short and "
        "shared-prefix, a trace or conversations for variable-length and parallel-sampling, conversations for "
        "multi-turn; repeat the flag for several files",
    )
    study.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="skip and count malformed lines of --dataset-path instead of failing",
    )
    study.add_argument(
        "--page-sizes",
        type=_page_sizes,
        metavar="SIZES",
        help="page sizes for which to compute wasted memory, separated by commas, or none (default: "
        f"{', '.join(map(str, SHORT.page_sizes))}; with --full powers of two up to {FULL.page_sizes[-1]})",
    )
    study.add_argument(
        "--granule-sizes",
        type=_granule_sizes,
        metavar="SIZES",
        help=f"granules of vattention, separated by commas: {', '.join(GRANULES)}, the last in one tensor for K of "
        f"all 32 layers and one for V (default: {', '.join(SHORT.granules)}; with --full all)",
    )
    study.add_argument(
        "--num-prompts",
        type=count,
        metavar="COUNT",
        help="number of requests or chats of each workload (default: as many as fill the pool four times)",
    )
    study.add_argument(
        "--seed", type=whole_number, default=0, help="seed of lengths and arrival times (default: 0)"
    )
    study.add_argument(
        "--measure",
        action="store_true",
        help="also run the engine with the schemes that it has, and compare throughput",
    )
    study.add_argument(
        "--measure-lengths",
        type=_whole_numbers,
        metavar="LENGTHS",
        help="with --measure: tokens of a prompt and its answer, separated by commas (default: 512,2048)",
    )
    study.add_argument(
        "--batch-sizes",
        type=_whole_numbers,
        metavar="SIZES",
        help="with --measure: sequences at once, separated by commas (default: powers of two up to 512)",
    )
    add_output_flags(parser.add_argument_group("output"), "result", "an HTML page with plots into this folder")
    add_engine_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the study; returns the exit code."""
    config = engine_config(args)
    _check_flags(args, config)
    extent = FULL if args.full else SHORT
    if args.page_sizes is None:
        args.page_sizes = list(extent.page_sizes)
    if args.granule_sizes is None:
        args.granule_sizes = [GRANULES[name] for name in extent.granules]
    if args.max_total_tokens is None:
        print(f"a pool of {extent.pool_tokens:,} tokens; all workloads and schemes take {extent.duration}", end="")
        print("" if args.full else f", with --full {FULL.duration}", flush=True)
    from radixkv.lab.studies.paging.show import run_study

    run_study(args, config, extent.pool_tokens)
    return 0


def _check_flags(args: argparse.Namespace, config: EngineConfig) -> None:
    parser: Parser = args.parser
    if not args.measure:
        flags = [flag for flag in engine_flags(config) if not flag.startswith(STUDY_FLAGS)]
        if flags:
            parser.error(f"{' '.join(flags)} has no effect without --measure; leave it out, or add --measure")
        if args.measure_lengths or args.batch_sizes:
            parser.error("--measure-lengths and --batch-sizes have no effect without --measure; add it")
    elif not config.cache.enable_prefix_caching:
        parser.error("--measure runs with prefix caching on and off; leave out --no-enable-prefix-caching")
    if args.seed < 0:
        parser.error(f"seed {args.seed} must be at least 0")
    if args.skip_bad_lines and not args.dataset_path:
        parser.error("--skip-bad-lines needs a data set; give --dataset-path, or leave it out")


def _workloads(text: str) -> list[str]:
    return _names(text, "workload", WORKLOADS)


def _schemes(text: str) -> list[str]:
    return _names(text, "scheme", SCHEMES)


def _granule_sizes(text: str) -> list[tuple[int, int]]:
    return [GRANULES[name] for name in _names(text, "size of granules", GRANULES)]


def _names(text: str, kind: str, known: Collection[str]) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} is not a {kind}; use {', '.join(known)}")
    return names


def _page_sizes(text: str) -> list[int]:
    return [] if text == "none" else _whole_numbers(text)


def _whole_numbers(text: str) -> list[int]:
    return sorted({count(number) for number in text.split(",")})
