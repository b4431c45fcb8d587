"""Times sampling on the GPU: milliseconds per step, by the sampling parameters of its rows.

Appends one JSON line per case, kind of logits and number of rows. `ms` is the device's time, and `host_ms` the time
to enqueue a step; with overlapping steps, the larger one counts. Every slot already has its history.

    greedy            the argmax and the check for finite logits, which all cases include
    temperature       temperature 0.8, as in all cases below
    top_k_and_top_p   50 and 0.9
    top_p             0.9
    min_p             0.05
    top_k_40, _128    listed one by one
    top_k_129         bounded by a search, as is any top_k above 128
    large_top_k       1,000
    penalties         repetition, frequency and presence, after 1,000 tokens
    logprobs          20
    all               top_k, top_p, min_p, penalties, 300 biases, three banned tokens, 20 logprobs

Logits are bf16, normal with a standard deviation of 3 (`spread`: top_p keeps thousands of tokens), or the same with
40 tokens raised by 8 to 16 (`peaked`: top_p keeps about a dozen).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

import torch
from msgspec.structs import replace
from result_lines import add_gpu_flags, report, script_parser
from torch import Tensor

from gpu import gpu_provenance
from radixkv.runtime.device.ops.cuda.argmax import argmax, argmax_scratch
from radixkv.runtime.device.sampling.cuda.sampler import CudaSampler
from radixkv.runtime.step.plan import History, RowSampling

VOCAB = 128_256
DEVICE = torch.device("cuda")
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
DRAWN = replace(GREEDY, temperature=0.8)
PENALISED = replace(DRAWN, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1)
BIASES = tuple((token, 0.5) for token in Random(1).sample(range(VOCAB), 300))
CASES = {
    "greedy": GREEDY,
    "temperature": DRAWN,
    "top_k_and_top_p": replace(DRAWN, top_k=50, top_p=0.9),
    "top_p": replace(DRAWN, top_p=0.9),
    "min_p": replace(DRAWN, min_p=0.05),
    "top_k_40": replace(DRAWN, top_k=40),
    "top_k_128": replace(DRAWN, top_k=128),
    "top_k_129": replace(DRAWN, top_k=129),
    "large_top_k": replace(DRAWN, top_k=1000),
    "penalties": PENALISED,
    "logprobs": replace(DRAWN, n_logprobs=20),
    "all": replace(PENALISED, top_k=50, top_p=0.9, min_p=0.05, logit_bias=BIASES, banned=(1, 2, 3), n_logprobs=20),
}


@dataclass
class Step:
    """The sampling of one step: argmax and sampler."""

    sampler: CudaSampler
    logits: Tensor

    def __post_init__(self) -> None:
        n_rows = len(self.logits)
        self.argmax_result = torch.zeros(2, n_rows, dtype=torch.int32, device=DEVICE)
        self.scratch = argmax_scratch(n_rows, VOCAB, DEVICE)
        self.batch_slots = range(n_rows)

    def run(self, rows: Sequence[RowSampling]) -> None:
        greedy, finite = self.argmax_result
        argmax(self.logits, greedy, finite, self.scratch)
        if rows[0].temperature:
            self.sampler.sample(self.logits, self.batch_slots, rows, greedy, finite)


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 512])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    about = {
        "rounds": arguments.rounds,
        "vocab": VOCAB,
        **gpu_provenance("cuda", arguments.commit),
    }
    with torch.inference_mode():
        sampler = CudaSampler(max(arguments.rows), VOCAB, DEVICE)
        for n_rows in arguments.rows:
            for line in measure(sampler, n_rows, arguments.rounds):
                report(arguments.output_file, line, about)


def measure(sampler: CudaSampler, n_rows: int, n_rounds: int) -> Iterator[dict[str, object]]:
    """Yields the result lines."""
    for shape in ("spread", "peaked"):
        step = Step(sampler, make_logits(shape, n_rows))
        for name, kind in CASES.items():
            rows = [replace(kind, seed=seed) for seed in range(n_rows)]
            if kind.has_penalties:
                step.run([replace(row, history=history(row.seed)) for row in rows])
            device_ms, host_ms = time_ms(step, rows, n_rounds)
            yield {"case": name, "rows": n_rows, "logits": shape, "ms": device_ms, "host_ms": host_ms}


def time_ms(step: Step, rows: Sequence[RowSampling], n_rounds: int) -> tuple[float, float]:
    """Returns medians of a step's time on the device, after work that hides the host's, and on the host."""
    step.run(rows)
    device, host = [], []
    for index in range(n_rounds):
        rows = [replace(row, index=index) for row in rows]
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        begin.record()
        step.run(rows)
        end.record()
        host.append(1e3 * (time.perf_counter() - started))
        end.synchronize()
        device.append(begin.elapsed_time(end))
    return round(median(device), 4), round(median(host), 4)


def make_logits(shape: str, n_rows: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(n_rows, VOCAB, generator=generator, device=DEVICE) * 3.0
    if shape == "peaked":
        peaks = torch.randint(VOCAB, (n_rows, 40), generator=generator, device=DEVICE)
        raised = 8.0 + 8.0 * torch.rand(n_rows, 40, generator=generator, device=DEVICE)
        logits.scatter_add_(1, peaks, raised)
    return logits.bfloat16()


def history(seed: int) -> History:
    tokens = array("i", Random(seed).choices(range(VOCAB), k=1000))
    return History(tokens.tobytes(), 500)


if __name__ == "__main__":
    main()
