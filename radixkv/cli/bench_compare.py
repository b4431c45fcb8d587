"""``radixkv bench compare``: files of results side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from radixkv.cli.arguments import Parser


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "compare",
        help="how much better one file of results is than another",
        description="Print how many times as good each file's runs are as the first's: over 1 is better, also for "
        "times. Files with equally many runs are compared run by run, in their order.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="what --output-file wrote; the first is compared with"
    )
    parser.add_argument("--force", action="store_true", help="compare also what differs in workload, model or load")
    parser.add_argument("--json", action="store_true", help="print a JSON line a comparison instead of tables")
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the comparisons; the exit code."""
    parser: Parser = args.parser
    if len(args.files) < 2:
        parser.error("one file has nothing to be compared with; give two or more")
    import msgspec

    from radixkv.bench.report.compare import compare, table

    comparisons = compare(args.files, force=args.force)
    if args.json:
        for comparison in comparisons:
            print(msgspec.json.encode(comparison).decode())
    else:
        print("\n\n".join(map(table, comparisons)))
    return 0
