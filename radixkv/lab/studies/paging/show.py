"""The run of ``radixkv bench paging``, which prints each table as soon as it is done."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.lab.bench.formatting import plural
from radixkv.lab.bench.output import check_outputs, open_saver
from radixkv.lab.studies.paging import tables
from radixkv.lab.studies.paging.command import MAX_MODEL_LEN
from radixkv.lab.studies.paging.processes import worker_processes
from radixkv.lab.studies.paging.recommendation import RECOMMENDATION_LEGEND, recommend
from radixkv.lab.studies.paging.recorded_lengths import recorded_lengths
from radixkv.lab.studies.paging.schemes import SCHEMES, Granule
from radixkv.lab.studies.paging.study import ResultLine, StudySettings, compare_page_sizes, compare_schemes
from radixkv.processes.cores import n_cores
from radixkv.settings.config import EngineConfig
from radixkv.terminal import Progress, table, wrapped

if TYPE_CHECKING:
    from radixkv.lab.studies.paging.measure import MeasureSettings

Save = Callable[[Sequence[ResultLine]], None]

MEASURE_LENGTHS = (512, 2048)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def run_study(args: argparse.Namespace, config: EngineConfig, pool_tokens: int) -> None:
    """Prints the table of each workload as soon as it is done, then page sizes, measurements and plots.

    Args:
        args: the flags of the study.
        config: of the engine.
        pool_tokens: tokens of the simulated pool, if ``args`` does not say.
    """
    check_outputs(args.output_file, args.plot)
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
        schemes=args.schemes or tuple(SCHEMES),
        page_size=args.page_size,
        granules=[Granule(*granule) for granule in args.granule_sizes],
        page_sizes=args.page_sizes,
        pool_tokens=pool_tokens if args.max_total_tokens is None else args.max_total_tokens,
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

    def draw(measured: Sequence[ResultLine]) -> None:
        """Writes the page; a page that is there is replaced."""
        if args.plot is not None:
            from radixkv.lab.studies.paging.plots import plot

            with Progress("drawing the plots"):
                plot(by_scheme, by_page_size, remarks, recommendations, measured, args.plot)

    draw([])
    if measured is not None:
        draw(_measure(config, measured, save))
    if args.plot is not None:
        print(f"\nplots: {args.plot / 'index.html'}")


def _show_schemes(lines_by_workload: Mapping[str, Iterator[ResultLine]], save: Save) -> list[ResultLine]:
    """Prints and saves the lines of each workload when they have come; returns all of them."""
    print(tables.SCHEME_LEGEND)
    lines: list[ResultLine] = []
    for name, lines_as_they_come in lines_by_workload.items():
        of_workload: list[ResultLine] = []
        with Progress(f"simulating {name}") as progress:
            for line in lines_as_they_come:
                of_workload.append(line)
                progress.show(f"{tables.scheme_label(line)} is done")
        print(wrapped(f"\n{tables.scheme_heading(of_workload)}"))
        print(table(*tables.scheme_table(of_workload)))
        print("\n".join(tables.target_lines(tables.targets(of_workload))), flush=True)
        save(of_workload)
        lines += of_workload
    return lines


def _show_page_sizes(
    lines_as_they_come: Iterator[ResultLine], settings: StudySettings, save: Save
) -> tuple[list[ResultLine], list[str]]:
    """Saves each line when it has come, and prints all; returns them, and remarks on them."""
    lines: list[ResultLine] = []
    with Progress("comparing page sizes") as progress:
        for line in lines_as_they_come:
            save([line | {"study": "page_size"}])
            lines.append(line)
            progress.show(f"{line['workload']} with pages of {plural(line['page_size'], 'token')} is done")
    if lines:
        print(f"\n{tables.LOST_LEGEND}")
        print(table(*tables.lost_table(lines)))
    columns, rows = tables.cost_table(lines)
    if rows:
        print(f"\n{tables.COST_LEGEND}")
        print(table(columns, rows))
    remarks = tables.page_size_remarks(lines, settings.workloads, settings.page_sizes)
    if remarks:
        print(wrapped("\n".join(["", *remarks])), flush=True)
    return lines, remarks


def _recommend(by_scheme: Sequence[ResultLine]) -> list[tuple[str, str]]:
    """Prints and returns each workload with its recommendation."""
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

    lines: list[ResultLine] = []
    with Progress("measuring the engine") as progress:
        for line in measure(config, settings):
            save([line | {"study": "measure"}])
            lines.append(line)
            progress.show(f"{line['scheme']}, length {line['length']}, batches of {line['batch_size']} is done")
    print(f"\n{tables.CURVE_LEGEND}")
    for length in settings.lengths:
        of_length = [line for line in lines if line["length"] == length]
        print(f"\nlength {length}:\n{table(*tables.curve_table(of_length))}")
    best = tables.saturation_lines(lines)
    print(f"\n{tables.SATURATION_LEGEND}")
    print(table(*tables.saturation_table(best)))
    print("\n".join(tables.target_lines(tables.measured_targets(best))), flush=True)
    return lines
