"""Measures how long a short prompt waits behind long ones, or how long running rows wait for chunks of long ones.

Runs the loop, without a server, with prompts of random token ids. Appends one JSON line.

Long prompts come together, and one step later a short one. The line says when the short prompt and the last long
one had their first tokens, and when all requests had ended. Each time is a pair, seconds of wall time and of
processor time, since the long prompts were sent:

    python bench/fair_chunks.py --prompts 12 --prompt-tokens 7000 --short-tokens 24

With ``--rows`` long prompts come one after the other, while so many rows generate answers. A step of at least
``--prompt-tokens`` and rows never splits a prompt. The line has the milliseconds between two steps' tokens of the
rows, before the prompts and beside them, and the median wall time from a prompt to its first token:

    for n in 2048 8192 32768; do
        python bench/fair_chunks.py --shape llama-8b --device cuda --attention-backend triton --rows 128 \\
            --prompts 6 --prompt-tokens 16000 --step-tokens $n --output-file chunks.jsonl
    done
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from result_lines import report, script_parser
from shapes import MODELS, write_model

from gpu import gpu_provenance
from radixkv.checkpoints import resolve
from radixkv.runtime.loop import Loop
from radixkv.runtime.open_loop import build_loop
from radixkv.settings.config import EngineConfig, ModelConfig, SchedulerConfig
from radixkv.wire.messages import Submit, Tokens, pack_tokens
from radixkv.wire.sampling import SamplingParams

ROW_PROMPT_TOKENS = 64
N_WARM_UP, N_ALONE = 8, 40
"""Turns of the rows before any is timed, and timed turns without prompts."""
MIN_CHUNK_TOKENS = 256
"""The smallest chunks that a target for the time between tokens leads to."""


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        loop = open_loop(arguments, Path(folder))
    requests = Requests(loop)
    line = beside_rows(requests, arguments) if arguments.rows else behind_prompts(requests, arguments)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("output_file", "commit")}
    line["max_num_batched_tokens"] = loop.ready.max_num_batched_tokens
    loop.close()
    report(arguments.output_file, settings | line, gpu_provenance(arguments.device, arguments.commit))


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", choices=MODELS, help="dummy weights of this shape, in place of --model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--step-tokens", type=int, help="most tokens of a step (default: the engine's)")
    parser.add_argument(
        "--target-itl-ms",
        type=lambda text: None if text == "off" else float(text),
        default=50.0,
        help="time between tokens that chunks are cut for, or off (default: %(default)s)",
    )
    parser.add_argument("--rows", type=int, default=0, help="rows that generate answers (default: 0, none)")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--short-tokens", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--commit", help="the commit that is checked out, if there is no .git folder")
    return parser.parse_args()


def open_loop(arguments: argparse.Namespace, folder: Path) -> Loop:
    """Opens the loop over the model."""
    is_dummy = arguments.shape is not None
    model = str(write_model(MODELS[arguments.shape], folder)) if is_dummy else arguments.model
    dummy: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16"} if is_dummy else {}
    settings = ModelConfig(model, device=arguments.device, attention_backend=arguments.attention_backend, **dummy)
    scheduler = SchedulerConfig(max_num_batched_tokens=arguments.step_tokens, target_itl_ms=arguments.target_itl_ms)
    checkpoint = resolve(model, load_format=dummy.get("load_format", "auto"))
    return build_loop(EngineConfig(settings, scheduler=scheduler), checkpoint)


class Requests:
    """The requests of a loop, and when they had tokens.

    Args:
        loop: without requests.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._rng = random.Random(1)

    def submit(self, name: str, n_tokens: int, n_new: int) -> None:
        """Sends a prompt of random tokens."""
        tokens = self._rng.choices(range(10, self.loop.ready.vocab_size), k=n_tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=n_new, ignore_eos=True)
        refused = self.loop.receive(Submit(name, pack_tokens(tokens), sampling))
        assert not refused, refused

    def turn(self) -> list[str]:
        """Turns the loop once. Returns the requests that have new tokens."""
        return [item.id for message in self.loop.turn() if isinstance(message, Tokens) for item in message.items]

    def turn_until(self, awaited: str | None = None) -> list[float]:
        """Turns until a request has new tokens, or any if None. Returns the seconds of each turn with tokens."""
        times_s, last = [], time.perf_counter()
        while True:
            names = self.turn()
            if names:
                now = time.perf_counter()
                times_s.append(now - last)
                last = now
                if awaited is None or awaited in names:
                    return times_s


def behind_prompts(requests: Requests, arguments: argparse.Namespace) -> dict[str, Any]:
    """Sends long prompts together, and a short one behind them."""
    for number in range(arguments.prompts):
        requests.submit(str(number), arguments.prompt_tokens, arguments.new_tokens)
    started, started_cpu = time.perf_counter(), time.process_time()
    first_tokens: dict[str, tuple[float, float]] = {}
    n_turns = 0
    while requests.loop.has_work:
        names = requests.turn()
        now = round(time.perf_counter() - started, 2), round(time.process_time() - started_cpu, 2)
        for name in names:
            first_tokens.setdefault(name, now)
        n_turns += 1
        if n_turns == 1:
            requests.submit("short", arguments.short_tokens, arguments.new_tokens)
    short = first_tokens.pop("short")
    return {
        "short_first_token_s": short,
        "last_long_first_token_s": max(first_tokens.values()),
        "end_s": now,
        "turns": n_turns,
    }


def beside_rows(requests: Requests, arguments: argparse.Namespace) -> dict[str, Any]:
    """Sends long prompts one after the other beside rows that generate answers, after one that is not timed."""
    step_tokens = requests.loop.ready.max_num_batched_tokens
    n_chunks = -(-arguments.prompt_tokens // max(step_tokens - arguments.rows, 1))
    if arguments.target_itl_ms is not None:
        n_chunks = max(n_chunks, -(-arguments.prompt_tokens // MIN_CHUNK_TOKENS))
    n_new = N_WARM_UP + N_ALONE + (arguments.prompts + 1) * (n_chunks + arguments.new_tokens + 4)
    for number in range(arguments.rows):
        requests.submit(f"row {number}", ROW_PROMPT_TOKENS, n_new)
    requests.submit("first", arguments.prompt_tokens, arguments.new_tokens)
    requests.turn_until("first")
    for _ in range(N_WARM_UP):
        requests.turn()
    alone_s = [seconds for _ in range(N_ALONE) for seconds in requests.turn_until()]
    begun = time.perf_counter()
    beside_s: list[float] = []
    prompts_s: list[float] = []
    for number in range(arguments.prompts):
        sent = time.perf_counter()
        requests.submit(str(number), arguments.prompt_tokens, arguments.new_tokens)
        beside_s += requests.turn_until(str(number))
        prompts_s.append(time.perf_counter() - sent)
    all_s = time.perf_counter() - begun
    assert requests.loop.has_work, "the rows ended before the prompts"
    ordered = sorted(beside_s)
    n_tokens = arguments.prompts * arguments.prompt_tokens + len(beside_s) * arguments.rows
    return {
        "alone_ms": round(1e3 * median(alone_s), 2),
        "beside_median_ms": round(1e3 * median(ordered), 2),
        "beside_p99_ms": round(1e3 * ordered[int(0.99 * len(ordered))], 2),
        "beside_max_ms": round(1e3 * ordered[-1], 2),
        "steps_beside": len(ordered),
        "prompt_s": round(median(prompts_s), 4),
        "seconds": round(all_s, 4),
        "row_tokens_per_s": round(len(beside_s) * arguments.rows / all_s, 1),
        "all_tokens_per_s": round(n_tokens / all_s, 1),
    }


if __name__ == "__main__":
    main()
