"""``radixkv bench compare``: comparison of result files."""

from __future__ import annotations

import argparse
from pathlib import Path

from radixkv.arguments import Parser


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "compare",
        help="compare result files with each other",
        description="Print the runs of each file relative to those of the first file: a ratio above 1 is better, "
        "also for times. Files with the same number of runs are compared run by run, in their order.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="files written by --output-file; the first is the baseline",
    )
    parser.add_argument(
        "--force", action="store_true", help="compare runs even if they differ in workload, model or load"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per comparison instead of tables")
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the comparisons and returns the exit code."""
    parser: Parser = args.parser
    if len(args.files) < 2:
        parser.error("there is only one file; give two or more to compare")
    import msgspec

    from radixkv.bench.report.compare import compare, table

    comparisons = compare(args.files, force=args.force)
    if args.json:
        for comparison in comparisons:
            print(msgspec.json.encode(comparison).decode())
    else:
        print("\n\n".join(map(table, comparisons)))
    return 0
