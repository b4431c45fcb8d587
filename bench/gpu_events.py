"""Measures how much longer cache events make a step on a GPU, with dummy weights of the shape of Llama 3.1 8B.

The traffic and the subscribers are those of ``events.py``: 256 rows, of which one ends and one begins in each step,
and three subscribers, of which one does not read. Two engines on one GPU, with and without events, run in turn:
each pair has four short runs, with, without, without, with. By default each has weights of 16 GB and a pool of
42 GB, so both fit an H200, and no GPU of 80 GB.

Appends one JSON line: the median over pairs of the milliseconds that a step takes without and with events, by the
clock, the quartiles of the difference, and its median as a share of a step.

    python bench/gpu_events.py --output-file bench/results/events.jsonl
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

from events import N_OUTPUT, N_PROMPT, PAGE_SIZE, Traffic, pair, subscribed
from result_lines import add_gpu_flags, report, script_parser
from shapes import LLAMA_8B, SMALL, write_model

from gpu import gpu_provenance
from radixkv.checkpoints import resolve
from radixkv.runtime.device.factory import look_at_machine, resolve_config
from radixkv.runtime.device.ranks.open import open_ranks
from radixkv.runtime.step.executor import Executor
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig


def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser)
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--pages", type=int, default=20_000, help="pages of each pool (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="of each of the four runs (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=12, help="with and without (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, subscribed(f"ipc://{folder}/events") as publisher:
        model = write_model(SMALL if arguments.small else LLAMA_8B, Path(folder, "model"))
        off, on = (
            Traffic(
                arguments.rows,
                open_device(model, arguments.device, arguments.rows, arguments.pages),
                each,
                time.perf_counter,
            )
            for each in (None, publisher)
        )
        gc.collect()
        gc.disable()
        n_before = on.cache.n_evicted
        pairs = [pair(off, on, arguments.steps) for _ in range(arguments.pairs)]
        n_steps = 2 * arguments.pairs * arguments.steps
    differences = [with_events.turn_ms - without.turn_ms for without, with_events in pairs]
    low, difference, high = quantiles(differences, n=4)
    step_ms = median(without.turn_ms for without, _ in pairs)
    page_events = 2 * (on.cache.n_evicted - n_before) / n_steps
    line = {
        "case": "steps_on_a_gpu",
        "rows": arguments.rows,
        "page_events_per_step": round(page_events, 1),
        "page_events_per_s": round(page_events * 1e3 / step_ms),
        "step_ms_off": round(step_ms, 3),
        "step_ms_on": round(median(with_events.turn_ms for _, with_events in pairs), 3),
        "difference_ms": round(difference, 4),
        "difference_quartiles_ms": [round(low, 4), round(high, 4)],
        "percent_of_step": round(100 * difference / step_ms, 2),
        "pairs": arguments.pairs,
        "steps": arguments.steps,
    }
    report(arguments.output_file, line, gpu_provenance(arguments.device, arguments.commit))


def open_device(model: Path, device: Literal["cuda", "cpu"], n_rows: int, n_pages: int) -> Executor:
    """Opens an engine's device with dummy weights and a pool of so many pages."""
    config = EngineConfig(
        ModelConfig(
            str(model), dtype="bfloat16", load_format="dummy", device=device, max_model_len=N_PROMPT + N_OUTPUT
        ),
        CacheConfig(page_size=PAGE_SIZE, max_total_tokens=n_pages * PAGE_SIZE),
        SchedulerConfig(max_num_seqs=n_rows),
    )
    checkpoint = resolve(config.model.model, load_format="dummy")
    return open_ranks(resolve_config(config, checkpoint, look_at_machine(device)), checkpoint)


if __name__ == "__main__":
    main()
