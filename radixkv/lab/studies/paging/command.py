"""``radixkv bench paging``: memory use of paged KV compared with contiguous reservation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.processes.cores import n_cores
from radixkv.settings.arguments import Parser, add_engine_flags, count, engine_config, engine_flags, whole_number
from radixkv.settings.config import EngineConfig
from radixkv.terminal import Progress, table, wrapped

if TYPE_CHECKING:
    from radixkv.lab.studies.paging.experiments import ResultLine
    from radixkv.lab.studies.paging.measure import MeasureSettings
    from radixkv.lab.studies.paging.study import StudySettings

    Save = Callable[[Sequence[ResultLine]], None]

WORKLOADS = ("uniform-short", "variable-length", "shared-prefix", "multi-turn", "parallel-sampling")
SCHEMES = (
    *("reserve-maximum", "reserve-power-of-two", "reserve-factor", "oracle", "oracle-best-fit", "resize"),
    *("vattention", "vattention-shared", "paged", "radix"),
)
GRANULE_SIZES = {"64KiB": 1 << 16, "2MiB": 1 << 21}
MEASURE_LENGTHS = (512, 2048)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POOL_TOKENS = 65_536
MAX_MODEL_LEN = 2048

STUDY_FLAGS = ("--model=", "--revision=", "--tokenizer=", "--max-model-len=", "--page-size=", "--max-total-tokens=")
"""Engine flags that the study uses even without --measure; the tokenizer counts the tokens of texts."""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command to those of ``radixkv bench``."""
    parser = commands.add_parser(
        "paging",
        help="compare the memory use of paged KV with contiguous reservation",
        description="Simulate five workloads, without a model, on the engine's own page cache and on contiguous "
        "memory, and print what the memory is used for while requests wait for it. The pool has --max-total-tokens "
        f"(default: {POOL_TOKENS}); the longest sequence is --max-model-len (default: {MAX_MODEL_LEN}).",
    )
    study = parser.add_argument_group("study")
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
        default=list(PAGE_SIZES),
        metavar="SIZES",
        help="page sizes for which to compute wasted memory, separated by commas, or none (default: powers of two "
        "up to 256)",
    )
    study.add_argument(
        "--granule-sizes",
        type=_granule_sizes,
        default=list(GRANULE_SIZES.values()),
        metavar="SIZES",
        help=f"granules of vattention, separated by commas: {', '.join(GRANULE_SIZES)} (default: both)",
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
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-file", type=Path, metavar="FILE", help="append one JSON line per result to this file"
    )
    output.add_argument(
        "--plot", type=Path, metavar="FOLDER", help="write an HTML page with plots into this folder"
    )
    add_engine_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table of each workload as soon as it is done; returns the exit code."""
    config = engine_config(args)
    _check_flags(args, config)
    from radixkv.lab.bench.output import check_outputs, open_saver

    check_outputs(args.output_file, args.plot)
    from radixkv.lab.bench.formatting import plural
    from radixkv.lab.studies.paging.processes import worker_processes
    from radixkv.lab.studies.paging.recorded_lengths import recorded_lengths
    from radixkv.lab.studies.paging.study import StudySettings, compare_page_sizes, compare_schemes

    max_model_len = MAX_MODEL_LEN if args.max_model_len is None else args.max_model_len
    measured = _measure_settings(args, config, max_model_len) if args.measure else None
    model = config.model
    with Progress("reading the lengths of requests"):
        recorded = recorded_lengths(
            args.dataset_path,
            model.tokenizer or model.model,
            model.revision if model.tokenizer is None else None,
            workloads=args.workloads,
            skip_bad_lines=args.skip_bad_lines,
        )
    if recorded.n_bad_lines:
        print(f"skipped in the data: {plural(recorded.n_bad_lines, 'bad line')}")
    settings = StudySettings(
        recorded.lengths,
        workloads=args.workloads,
        schemes=args.schemes or SCHEMES,
        page_size=args.page_size,
        granule_sizes=args.granule_sizes,
        page_sizes=args.page_sizes,
        pool_tokens=POOL_TOKENS if args.max_total_tokens is None else args.max_total_tokens,
        max_model_len=max_model_len,
        n_conversations=args.num_prompts,
        seed=args.seed,
    )
    save = open_saver(args.output_file, "paging")
    with worker_processes(n_cores()) as map_items:
        # Several processes begin the simulations in the order of these calls, before any line is taken.
        schemes = {name: compare_schemes(replace(settings, workloads=[name]), map_items) for name in args.workloads}
        page_sizes = compare_page_sizes(settings, map_items)
        by_scheme = _show_schemes(schemes, save)
        by_page_size, remarks = _show_page_sizes(page_sizes, settings, save)
    recommendations = _recommend(by_scheme)
    report = partial(_plot, args.plot, by_scheme, by_page_size, remarks, recommendations)
    report([])
    if measured is not None:
        report(_measure(config, measured, save))
    if args.plot is not None:
        print(f"\nplots: {args.plot / 'index.html'}")
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


def _show_schemes(lines_by_workload: Mapping[str, Iterator[ResultLine]], save: Save) -> list[ResultLine]:
    """Prints and saves the lines of each workload when they have come; returns all of them."""
    from radixkv.lab.studies.paging.tables import (
        SCHEME_COLUMNS,
        SCHEME_LEGEND,
        scheme_cells,
        scheme_heading,
        scheme_label,
        target_lines,
        targets,
    )

    print(SCHEME_LEGEND)
    lines: list[ResultLine] = []
    for name, lines_as_they_come in lines_by_workload.items():
        of_workload: list[ResultLine] = []
        with Progress(f"simulating {name}") as progress:
            for line in lines_as_they_come:
                of_workload.append(line)
                progress.show(f"{scheme_label(line)} is done")
        print(wrapped(f"\n{scheme_heading(of_workload)}"))
        print(table(SCHEME_COLUMNS, [scheme_cells(line) for line in of_workload]))
        print("\n".join(target_lines(targets(of_workload))), flush=True)
        save(of_workload)
        lines += of_workload
    return lines


def _show_page_sizes(
    lines_as_they_come: Iterator[ResultLine], settings: StudySettings, save: Save
) -> tuple[list[ResultLine], list[str]]:
    """Saves each line when it has come, and prints all; returns them, and remarks on them."""
    from radixkv.lab.bench.formatting import plural
    from radixkv.lab.studies.paging.tables import (
        COST_COLUMNS,
        COST_LEGEND,
        LOST_LEGEND,
        cost_rows,
        lost_columns,
        lost_rows,
        page_size_remarks,
    )

    lines: list[ResultLine] = []
    with Progress("comparing page sizes") as progress:
        for line in lines_as_they_come:
            save([line | {"study": "page_size"}])
            lines.append(line)
            progress.show(f"{line['workload']} with pages of {plural(line['page_size'], 'token')} is done")
    if lines:
        print(f"\n{LOST_LEGEND}")
        print(table(lost_columns(lines), lost_rows(lines)))
    if rows := cost_rows(lines):
        print(f"\n{COST_LEGEND}")
        print(table(COST_COLUMNS, rows))
    remarks = page_size_remarks(lines, settings.workloads, settings.page_sizes)
    if remarks:
        print(wrapped("\n".join(["", *remarks])), flush=True)
    return lines, remarks


def _recommend(by_scheme: Sequence[ResultLine]) -> list[tuple[str, str]]:
    """Prints and returns each workload with its recommendation."""
    from radixkv.lab.studies.paging.recommendation import RECOMMENDATION_LEGEND, recommend

    recommendations = recommend(by_scheme)
    if recommendations:
        print(f"\n{RECOMMENDATION_LEGEND}")
        print(wrapped("\n".join(f"  {name}: {text}" for name, text in recommendations), 4), flush=True)
    return recommendations


def _measure_settings(args: argparse.Namespace, config: EngineConfig, max_model_len: int) -> MeasureSettings:
    """Returns what to measure. Raises ``RadixKVError`` before anything runs if the engine cannot."""
    from radixkv.lab.studies.paging.measure import MEASURABLE, MeasureSettings, check_engine

    settings = MeasureSettings(
        schemes=args.schemes or MEASURABLE,
        lengths=args.measure_lengths or sorted({min(length, max_model_len) for length in MEASURE_LENGTHS}),
        batch_sizes=args.batch_sizes or BATCH_SIZES,
        max_model_len=max_model_len,
        seed=args.seed,
    )
    check_engine(config, settings)
    return settings


def _measure(config: EngineConfig, settings: MeasureSettings, save: Save) -> list[ResultLine]:
    from radixkv.lab.studies.paging.measure import measure
    from radixkv.lab.studies.paging.tables import (
        CURVE_LEGEND,
        SATURATION_COLUMNS,
        SATURATION_LEGEND,
        curve_columns,
        curve_rows,
        measured_targets,
        saturation_cells,
        saturation_lines,
        target_lines,
    )

    lines: list[ResultLine] = []
    with Progress("measuring the engine") as progress:
        for line in measure(config, settings):
            save([line | {"study": "measure"}])
            lines.append(line)
            progress.show(f"{line['scheme']}, length {line['length']}, batches of {line['batch_size']} is done")
    print(f"\n{CURVE_LEGEND}")
    for length in settings.lengths:
        of_length = [line for line in lines if line["length"] == length]
        print(f"\nlength {length}:\n{table(curve_columns(of_length), curve_rows(of_length))}")
    best = saturation_lines(lines)
    print(f"\n{SATURATION_LEGEND}")
    print(table(SATURATION_COLUMNS, [saturation_cells(line, best) for line in best]))
    print("\n".join(target_lines(measured_targets(best))), flush=True)
    return lines


def _plot(
    folder: Path | None,
    by_scheme: Sequence[ResultLine],
    by_page_size: Sequence[ResultLine],
    remarks: Sequence[str],
    recommendations: Sequence[tuple[str, str]],
    measured: Sequence[ResultLine],
) -> None:
    """Writes the page into the folder, if there is one; a page that is there is replaced."""
    if folder is None:
        return
    from radixkv.lab.studies.paging.plots import plot

    with Progress("drawing the plots"):
        plot(by_scheme, by_page_size, remarks, recommendations, measured, folder)


def _workloads(text: str) -> list[str]:
    return _names(text, "workload", WORKLOADS)


def _schemes(text: str) -> list[str]:
    return _names(text, "scheme", SCHEMES)


def _granule_sizes(text: str) -> list[int]:
    return [GRANULE_SIZES[name] for name in _names(text, "size of granules", GRANULE_SIZES)]


def _names(text: str, kind: str, known: Collection[str]) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} is not a {kind}; use {', '.join(known)}")
    return names


def _page_sizes(text: str) -> list[int]:
    return [] if text == "none" else _whole_numbers(text)


def _whole_numbers(text: str) -> list[int]:
    return sorted({count(number) for number in text.split(",")})
