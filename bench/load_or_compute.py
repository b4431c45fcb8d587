"""From which length on is loading a prefix from host memory faster than computing it? By length and size of model.

Models have dummy weights of the shapes of Qwen3 0.6B to 32B. A prefix is computed in steps of at most 8,192 tokens,
or loaded from random host slots to random pages. Both times are medians of ``--rounds``, each alone on the GPU. One
JSON line for each model and length.

    python bench/load_or_compute.py --output-file bench/results/load_or_compute.jsonl
    python bench/load_or_compute.py --plot bench/results/load_or_compute.jsonl docs/images/load-or-compute.png
    python bench/load_or_compute.py --small --device cpu --rounds 1       # tries the code
"""

from __future__ import annotations

import json
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from result_lines import add_gpu_flags, report, script_parser
from shapes import QWEN3, SMALL, write_model

from gpu import gpu_provenance
from radixkv.checkpoints import resolve
from radixkv.lab.bench.report.html_page import COLOURS, MUTED_COLOUR, entitle, label_ends, new_figure, save, style
from radixkv.runtime.device.factory import look_at_machine, resolve_config
from radixkv.runtime.device.ranks.open import open_ranks
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.page_copier import PageCopier
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.wire.messages import pack_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_SIZE = 16
STEP_TOKENS = 8192
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
SMALL_LENGTHS = (16, 64)


def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser)
    parser.add_argument("--small", action="store_true", help="a small model and short prefixes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--plot", nargs=2, type=Path, metavar=("LINES", "IMAGE"), help="draw recorded lines instead"
    )
    arguments = parser.parse_args()
    if arguments.plot:
        source, image = arguments.plot
        save(draw([json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]), image)
        return
    about = {"benchmark": "load_or_compute", **gpu_provenance(arguments.device, arguments.commit)}
    lengths = SMALL_LENGTHS if arguments.small else LENGTHS
    for name, config in {"small": SMALL}.items() if arguments.small else QWEN3.items():
        with tempfile.TemporaryDirectory() as folder:
            executor = open_device(write_model(config, Path(folder)), arguments.device, lengths[-1])
        for line in measure(executor, lengths, arguments.rounds):
            report(arguments.output_file, {"model": name, **line}, about)
        executor.close()


def open_device(folder: Path, device: str, max_tokens: int) -> Executor:
    """Opens a device whose pool holds two prefixes of ``max_tokens``."""
    model = ModelConfig(
        str(folder), dtype="bfloat16", load_format="dummy", device=device, max_model_len=max_tokens + PAGE_SIZE
    )
    config = EngineConfig(
        model,
        CacheConfig(page_size=PAGE_SIZE, max_total_tokens=2 * max_tokens),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=STEP_TOKENS),
    )
    checkpoint = resolve(model.model, load_format="dummy")
    return open_ranks(resolve_config(config, checkpoint, look_at_machine(device)), checkpoint)


def measure(executor: Executor, lengths: Sequence[int], n_rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a line for each length."""
    rng, n_pages = Random(1), 2 * lengths[-1] // PAGE_SIZE
    copier = executor.open_copier(n_pages * _page_bytes(executor))
    while copier.take_new_slots().stop < copier.n_slots:
        time.sleep(0.01)
    for n_tokens in lengths:
        pages, slots = (rng.sample(range(n_pages), n_tokens // PAGE_SIZE) for _ in range(2))
        compute_ms = milliseconds(partial(compute, executor, n_tokens, pages), n_rounds)
        load_ms = milliseconds(partial(load, copier, slots, pages), n_rounds)
        yield {
            "tokens": n_tokens,
            "page_bytes": copier.page_bytes,
            "compute_ms": round(compute_ms, 4),
            "load_ms": round(load_ms, 4),
        }
    copier.close()


def milliseconds(work: Callable[[], None], n_rounds: int) -> float:
    """Returns the median of the work's milliseconds, after a first time that does not count."""
    times_s = []
    for _ in range(n_rounds + 1):
        begun = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begun)
    return 1e3 * median(times_s[1:])


def compute(executor: Executor, n_tokens: int, pages: Sequence[int]) -> None:
    """Computes a prompt, each step launched before the one before it has ended."""
    steps = []
    for number, start in enumerate(range(0, n_tokens, STEP_TOKENS)):
        n_new = min(STEP_TOKENS, n_tokens - start)
        row = Row(
            batch_slot=0,
            start=start,
            n_tokens=n_new,
            tokens=pack_tokens(range(10, 10 + n_new)),
            write_start=start,
            table_start=0 if start == 0 else n_tokens // PAGE_SIZE,
            table_pages=tuple(pages) if start == 0 else (),
            sampling=None,
        )
        steps.append(executor.launch(StepPlan(number, (row,))).sample(None))
    for step in steps:
        step.result()


def load(copier: PageCopier, slots: Sequence[int], pages: Sequence[int]) -> None:
    """Loads pages, and waits for the event as the loop does."""
    copier.load(slots, pages)
    select.select([copier], [], [])
    (finished,) = copier.take_finished()
    assert finished.error is None


def draw(lines: Sequence[dict[str, Any]]) -> Figure:
    """Returns the plot of computing time by loading time, against the length, with a curve for each model."""
    figure = new_figure(9, 4.5)
    axes = figure.add_subplot()
    style(axes, x_title="tokens of the prefix (logarithmic)", y_title="time to compute / time to load")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhline(1.0, color=MUTED_COLOUR, linewidth=1.2, linestyle=(0, (4, 3)))
    labels = []
    models = list(dict.fromkeys(line["model"] for line in lines))
    for model, colour in zip(models, COLOURS, strict=False):
        points = [
            (line["tokens"], line["compute_ms"] / line["load_ms"]) for line in lines if line["model"] == model
        ]
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, marker="o", markersize=4, clip_on=False)
        labels.append((xs[-1], ys[-1], f"Qwen3 {model}: {ys[-1]:.1f}", colour))
    lengths = sorted({line["tokens"] for line in lines})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.1, lengths[-1])
    about = lines[0]["environment"]
    entitle(
        figure,
        "Above 1, loading a prefix from host memory is faster than computing it",
        f"{about['gpu']}, bfloat16, pages of {PAGE_SIZE} tokens; {lines[0]['date']}",
    )
    label_ends(axes, labels)
    return figure


def _page_bytes(executor: Executor) -> int:
    """Returns the size of a page: that of the smallest host tier's slot."""
    copier = executor.open_copier(1 << 30)
    n_bytes = copier.page_bytes
    copier.close()
    return n_bytes


if __name__ == "__main__":
    main()
