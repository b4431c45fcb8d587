"""``radixkv bench``: load tests of a server, whose results ``radixkv bench compare`` compares."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from radixkv.errors import ConfigError
from radixkv.lab.bench.flags import OVERRIDES, add_load_flags, add_output_flags, check_load_ranges
from radixkv.settings.arguments import Parser, add_engine_flags, answering_config, engine_flags
from radixkv.settings.client_flags import add_key_flags, api_key, has_key_flag
from radixkv.settings.config import EngineConfig
from radixkv.terminal import Progress

if TYPE_CHECKING:
    from radixkv.lab.bench.load.requests import PromptEncoder
    from radixkv.lab.bench.run import Benchmark, Outcome

EXAMPLES = """\
examples:
  radixkv bench --workload agents --compare-cache --plot pictures
  radixkv bench --workload fewshot --dataset-path gsm8k_test.jsonl --num-prompts 100 --output-file runs.jsonl
  radixkv bench --workload trace --dataset-path mooncake.jsonl --speed 4 --goodput ttft:500 tpot:50
  radixkv bench --workload chat --base-url http://127.0.0.1:8000 --request-rate 5
"""


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> argparse._SubParsersAction[Parser]:
    """Adds the command, with ``summary`` as its help; returns its subcommands, to which others may be added."""
    parser = commands.add_parser(
        "bench",
        help=summary,
        description="Run a workload against a server that is started for it, or against a running one.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subcommands = parser.add_subparsers(title="other measurements", metavar="COMMAND", parser_class=Parser)
    _add_compare(subcommands)
    add_load_flags(parser.add_argument_group("workload and load"))
    output = parser.add_argument_group("server and output")
    output.add_argument(
        "--base-url", metavar="URL", help="measure this running OpenAI-compatible server (default: start one)"
    )
    add_key_flags(output, "API key of the server at --base-url")
    output.add_argument(
        "--compare-cache",
        action="store_true",
        help="run the same requests twice, with the prefix cache off and on, and compare",
    )
    add_output_flags(output, "run", "an HTML page with plots into this folder")
    add_engine_flags(parser)
    parser.set_defaults(parser=parser, run=run)
    return subcommands


def _add_compare(commands: argparse._SubParsersAction[Parser]) -> None:
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
    parser.set_defaults(parser=parser, run=run_compare)


def run(args: argparse.Namespace) -> int:
    """Prints the report of each run and saves its JSON line as soon as the run is over.

    Returns:
        The exit code: 1 if a request failed, the server died, or outputs depend on the cache; 130 if the run was
        interrupted.
    """
    config = answering_config(args)
    _check_combination(args, config)
    check_load_ranges(args)
    from radixkv.lab.bench.output import check_outputs

    check_outputs(args.output_file, args.plot)
    with Progress(f"preparing the workload {args.workload}"):
        benchmark = _build_benchmark(args, config.model.model)
    code = 0
    outcomes: list[Outcome] = []
    for run_coroutine in _runs(args, benchmark, config):
        outcome = _run_until_stopped(run_coroutine)
        outcomes.append(outcome)
        code = max(code, _report(outcome, args.output_file))
        if outcome.metrics["aborted"] is not None:
            break
    if args.compare_cache and len(outcomes) == 2:
        code = max(code, _compare(outcomes))
    if args.plot is not None:
        _plot(outcomes, args.plot)
    return code


def run_compare(args: argparse.Namespace) -> int:
    """Prints the comparisons and returns the exit code."""
    parser: Parser = args.parser
    if len(args.files) < 2:
        parser.error("there is only one file; give two or more to compare")
    import msgspec

    from radixkv.lab.bench.report.compare import compare, table

    comparisons = compare(args.files, force=args.force)
    if args.json:
        for comparison in comparisons:
            print(msgspec.json.encode(comparison).decode())
    else:
        print("\n\n".join(map(table, comparisons)))
    return 0


def _check_combination(args: argparse.Namespace, config: EngineConfig) -> None:
    parser: Parser = args.parser
    if args.base_url is None and has_key_flag(args):
        parser.error(
            "--api-key and --api-key-file are for a running server; give its --base-url, or leave them out"
        )
    if args.base_url is not None:
        if args.compare_cache:
            parser.error("--compare-cache starts servers of its own; leave out --base-url")
        if args.prompt_form == "tokens" and args.tokenizer is None:
            parser.error("--prompt-form tokens needs the tokenizer of the server at --base-url; give --tokenizer")
        own = ("--model=", "--tokenizer=") if args.prompt_form == "tokens" else ("--model=",)
        flags = [flag for flag in engine_flags(config) if not flag.startswith(own)]
        if flags:
            parser.error(
                f"{' '.join(flags)} cannot change the server at --base-url, which is already running; leave it out"
            )
    if args.compare_cache and not config.cache.enable_prefix_caching:
        parser.error("--compare-cache measures with the cache off and on; leave out --no-enable-prefix-caching")
    if args.compare_cache and args.plain_requests:
        parser.error("--compare-cache compares token ids, which --plain-requests leaves out; leave one out")
    if args.speed is not None and args.request_rate is not None:
        parser.error("--speed scales the data set's own times, which --request-rate replaces; leave one out")
    if args.skip_bad_lines and args.dataset_path is None:
        parser.error("--skip-bad-lines needs a data set; give --dataset-path, or leave it out")


def _build_benchmark(args: argparse.Namespace, model: str) -> Benchmark:
    """Builds the benchmark; a flag that the workload does not support ends as wrong usage."""
    parser: Parser = args.parser
    from radixkv.lab.bench.run import Benchmark
    from radixkv.lab.bench.workloads.base import Source
    from radixkv.lab.bench.workloads.catalog import load_workload

    workload = load_workload(args.workload)
    overrides = {name: vars(args)[name] for name in OVERRIDES if vars(args)[name] is not None}
    try:
        workload = load_workload(args.workload, **overrides)
    except ConfigError as error:  # the workload loaded without the overrides, so a flag is wrong
        parser.error(str(error))
    return Benchmark(
        args.workload,
        workload,
        Source(args.seed, args.dataset_path, args.skip_bad_lines),
        max_concurrency=args.max_concurrency,
        request_rate=args.request_rate,
        speed=args.speed,
        warmup_requests=args.warmup_requests,
        goodput=dict(args.goodput),
        encoder=_prompt_encoder(model, args.revision, args.tokenizer) if args.prompt_form == "tokens" else None,
        has_extensions=not args.plain_requests,
        request_timeout_s=args.request_timeout,
    )


def _prompt_encoder(model: str, revision: str | None, tokenizer: str | None) -> PromptEncoder:
    """Returns an encoder with the server's tokenizer."""
    from radixkv.checkpoints.resolve import resolve_tokenizer
    from radixkv.lab.bench.load.requests import PromptEncoder

    if tokenizer is not None:
        return PromptEncoder(resolve_tokenizer(tokenizer))  # --revision is the model's, not the tokenizer's
    return PromptEncoder(resolve_tokenizer(model, revision))


def _runs(
    args: argparse.Namespace, benchmark: Benchmark, config: EngineConfig
) -> Iterator[Coroutine[Any, Any, Outcome]]:
    """Yields the runs in their order."""
    if args.base_url is not None:
        yield benchmark.run(args.base_url, model=args.model, api_key=api_key(args), use_environment=True)
        return
    if args.compare_cache:
        yield _with_server(benchmark, replace(config, cache=replace(config.cache, enable_prefix_caching=False)))
    yield _with_server(benchmark, config)


def _run_until_stopped(run_coroutine: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Runs the coroutine; SIGTERM and SIGHUP act like Ctrl-C, so that a started server is stopped first."""
    import asyncio
    import resource

    import uvloop

    # Raises the limit of open files: in an open loop every waiting request has a connection.
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))

    async def stoppable() -> Outcome:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for signal_number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signal_number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(signal_number, task.cancel)
        return await run_coroutine

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(stoppable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _with_server(benchmark: Benchmark, config: EngineConfig) -> Outcome:
    from radixkv.processes.server_process import ServerFailed, running_server

    outcome: Outcome | None = None
    flags = engine_flags(config)
    others = [flag for flag in flags if flag != "--no-enable-prefix-caching"]
    try:
        async with running_server(flags) as address:
            cache: Literal["on", "off"] = "on" if config.cache.enable_prefix_caching else "off"
            outcome = await benchmark.run(address, cache=cache, server=others)
    except ServerFailed as error:
        if outcome is None:
            raise
        outcome.metrics["aborted"] = str(error)
    return outcome


def _report(outcome: Outcome, path: Path | None) -> int:
    import msgspec

    from radixkv.lab.bench.output import append_lines
    from radixkv.lab.bench.report.result_table import failures, result_table

    try:
        if path is not None:
            append_lines(path, msgspec.json.encode(outcome.metrics) + b"\n")
    finally:  # the result is printed even if it cannot be saved, for example on a full disk
        print(result_table(outcome.metrics))
        if outcome.errors:
            print(failures(outcome.errors))
    if outcome.is_interrupted:
        return 130
    return 1 if outcome.errors or outcome.metrics["aborted"] is not None else 0


def _compare(outcomes: Sequence[Outcome]) -> int:
    from radixkv.lab.bench.report.result_table import comparison, outputs_equal

    off, on = (outcome.metrics for outcome in outcomes)
    print(comparison(off, on))
    return 0 if outputs_equal(off, on) else 1


def _plot(outcomes: Sequence[Outcome], folder: Path) -> None:
    from radixkv.lab.bench.report.charts import samples_of
    from radixkv.lab.bench.report.run_page import Run, plot

    with Progress("drawing the plots"):
        plot([Run(outcome.metrics, samples_of(outcome.measurement)) for outcome in outcomes], folder)
    print(f"plots: {folder / 'index.html'}")
