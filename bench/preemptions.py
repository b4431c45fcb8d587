"""Measures preemptions in a pool that growing answers fill, with several amounts of pages left free for them.

Requests with long answers arrive at random times, at about the rate that the device can serve or above it; no
prefix is shared. Each ``--reserve TOKENS:SHARE`` is an engine of its own, with ``num_reserved_decode_tokens`` and
``max_reserved_decode_share``, and dummy weights of the shape of Llama 3.1 8B. All engines get the same requests at
the same times. Prints one JSON line for each: preemptions, the tokens computed again for them and their share of
all computed tokens, seconds and throughput of the whole run, the longest pause within an answer (median, 90% and
longest of all answers), and the time to first token.

    python bench/preemptions.py --output-file bench/results/preemption.jsonl
    python bench/preemptions.py --reserve 16:0.0417 --reserve 64:0.0625 --rate 6
    python bench/preemptions.py --small --device cpu      # tries the code
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from result_lines import add_gpu_flags, report, script_parser
from shapes import LLAMA_8B, SMALL, write_model

from gpu import gpu_provenance
from radixkv.checkpoints import resolve
from radixkv.runtime.loop import Loop
from radixkv.runtime.open_loop import build_loop
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.wire.messages import GetStats, Submit, Tokens, pack_tokens
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats

VOCAB = 32_000
DEFAULT_RESERVES = ((16, 1 / 24), (32, 1 / 16), (64, 1 / 16), (128, 1 / 12))


class Arrival(NamedTuple):
    """A request, and when it arrives."""

    time_s: float
    prompt: list[int]
    n_output: int


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--reserve", type=_reserve, action="append", metavar="TOKENS:SHARE", help="may occur several times"
    )
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--prompt-tokens", type=int, default=500, help="half of it to one and a half")
    parser.add_argument("--output-tokens", type=int, default=1000, help="half of it to one and a half")
    parser.add_argument("--pool-tokens", type=int, default=65_536, help="size of the pool")
    parser.add_argument("--small", action="store_true", help="a small model, few and short requests, a small pool")
    add_gpu_flags(parser)
    arguments = parser.parse_args()
    if arguments.small:
        arguments.requests, arguments.rate, arguments.pool_tokens = 12, 100.0, 512
        arguments.prompt_tokens, arguments.output_tokens = 40, 80
    names = ("requests", "rate", "prompt_tokens", "output_tokens", "pool_tokens")
    settings = {name: vars(arguments)[name] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        write_model(SMALL if arguments.small else LLAMA_8B, Path(folder))
        for n_tokens, share in arguments.reserve or DEFAULT_RESERVES:
            begun = time.perf_counter()
            loop = open_loop(arguments, folder, n_tokens, share)
            warm_up(loop)
            start = {"start_s": round(time.perf_counter() - begun, 1)}
            line = measure(loop, draw_arrivals(arguments))
            loop.close()
            del loop
            gc.collect()
            reserve = {"num_reserved_decode_tokens": n_tokens, "max_reserved_decode_share": round(share, 4)}
            report(
                arguments.output_file,
                {"workload": "preemptions", **reserve, **line},
                {**start, **settings, **gpu_provenance(arguments.device, arguments.commit)},
            )


def _reserve(text: str) -> tuple[int, float]:
    n_tokens, _, share = text.partition(":")
    try:
        return int(n_tokens), float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not such as 64:0.0625") from None


def open_loop(arguments: argparse.Namespace, folder: str, n_tokens: int, share: float) -> Loop:
    config = EngineConfig(
        ModelConfig(folder, device=arguments.device, load_format="dummy", grammar_backend="none"),
        CacheConfig(max_total_tokens=arguments.pool_tokens),
        SchedulerConfig(num_reserved_decode_tokens=n_tokens, max_reserved_decode_share=share),
    )
    return build_loop(config, resolve(folder, load_format="dummy"))


def draw_arrivals(arguments: argparse.Namespace) -> list[Arrival]:
    """Returns the requests in order; equal arguments give equal ones."""
    rng = Random(1)
    n_requests = arguments.requests
    times = sorted(rng.uniform(0, n_requests / arguments.rate) for _ in range(n_requests))
    return [
        Arrival(
            time_s,
            [rng.randrange(10, VOCAB) for _ in range(_around(rng, arguments.prompt_tokens))],
            _around(rng, arguments.output_tokens),
        )
        for time_s in times
    ]


def _around(rng: Random, n: int) -> int:
    """Returns a random length from half of ``n`` to one and a half."""
    return rng.randint(n // 2, n * 3 // 2)


def warm_up(loop: Loop) -> None:
    for number in range(4):
        submit(loop, f"warm-up {number}", [17 + number] * 64, 8)
    while loop.has_work:
        loop.turn()


def submit(loop: Loop, name: str, prompt: list[int], n_output: int) -> None:
    refused = loop.receive(
        Submit(name, pack_tokens(prompt), SamplingParams(temperature=0.0, max_tokens=n_output, ignore_eos=True))
    )
    assert not refused, refused


def measure(loop: Loop, arrivals: list[Arrival]) -> dict[str, Any]:
    """Runs all requests to their end, each from its time of arrival on."""
    before = stats_of(loop)
    todo = deque(enumerate(arrivals))
    last: dict[str, float] = {}
    pauses = dict.fromkeys(map(str, range(len(arrivals))), 0.0)
    first: dict[str, float] = {}
    begun = time.perf_counter()
    while todo or loop.has_work:
        now = time.perf_counter() - begun
        while todo and todo[0][1].time_s <= now:
            number, (_, prompt, n_output) = todo.popleft()
            submit(loop, str(number), prompt, n_output)
        if not loop.has_work:
            time.sleep(todo[0][1].time_s - now)
            continue
        messages = loop.turn()
        now = time.perf_counter() - begun
        for message in messages:
            for item in message.items if isinstance(message, Tokens) else ():
                if item.id in last:
                    pauses[item.id] = max(pauses[item.id], now - last[item.id])
                else:
                    first[item.id] = now - arrivals[int(item.id)].time_s
                last[item.id] = now
    duration = time.perf_counter() - begun
    after = stats_of(loop)
    n_recomputed = after.recomputed_tokens_total - before.recomputed_tokens_total
    n_prompt, n_output = sum(len(one.prompt) for one in arrivals), sum(one.n_output for one in arrivals)
    return {
        "preemptions": after.preemptions_total - before.preemptions_total,
        "recomputed_tokens": n_recomputed,
        "recomputed_pct": round(100 * n_recomputed / (n_prompt + n_output + n_recomputed), 2),
        "duration": round(duration, 3),
        "output_tokens_per_s": round(n_output / duration, 1),
        **_percentiles("pause_s", list(pauses.values())),
        **_percentiles("ttft_s", list(first.values())),
        "steps": after.steps_total - before.steps_total,
        "pages": after.n_pages,
    }


def stats_of(loop: Loop) -> Stats:
    (stats,) = loop.receive(GetStats("stats"))
    assert isinstance(stats, Stats)
    return stats


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    values.sort()
    picks = {"p50": len(values) // 2, "p90": len(values) * 9 // 10, "max": len(values) - 1}
    return {f"{name}_{pick}": round(values[index], 3) for pick, index in picks.items()}


if __name__ == "__main__":
    main()
