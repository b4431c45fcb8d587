"""Measures the CPU sampler's time per step: each option alone and all together, compared with greedy sampling.

Appends one JSON line per case and distribution of the logits. The cases run the engine's own sampler, its checks
included. Every batch slot has its history and biases already and samples one token per step. torch has one thread,
as on a two-core machine. Each round runs all cases in turn; a ratio is the median over the rounds.

    torch_argmax   `logits.argmax(-1)`: greedy choice without the check for finite logits
    greedy         temperature 0, by the sampler
    temperature    temperature 0.8, which all cases below use too
    top_k          50
    top_p          0.9
    min_p          0.05
    penalties      repetition, frequency and presence, after about 1,000 tokens
    logit_bias     300 tokens
    logprobs       20
    all            all of these, and three tokens banned

Logits are normal with a deviation of 3 (`spread`: top_p keeps thousands of tokens), the same with 40 tokens raised
by 8 to 16 (`peaked`: top_p keeps a dozen or so), or with a deviation of 1 (`flat`: top_p keeps tens of thousands).
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from random import Random
from statistics import median

import torch
from msgspec.structs import replace
from result_lines import append, script_parser
from torch import Tensor

from radixkv.lab.bench.environment import provenance
from radixkv.runtime.device.sampling.cpu import Sampler
from radixkv.runtime.device.sampling.logit_edits import has_edits
from radixkv.runtime.step.plan import History, RowSampling

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
DRAWN = replace(GREEDY, temperature=0.8)
N_BIASES = 300


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--history", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for distribution in ("peaked", "spread", "flat"):
        logits = random_logits(distribution, arguments.rows, arguments.vocab)
        times_ms = measure(build_cases(logits, arguments.history, 1 + arguments.rounds), arguments.rounds)
        for name, own in times_ms.items():
            line = {
                "case": name,
                "logits": distribution,
                "ms_per_step": round(median(own), 2),
                "min_ms": round(min(own), 2),
                "times_greedy": ratio(own, times_ms["greedy"]),
                "times_torch_argmax": ratio(own, times_ms["torch_argmax"]),
                "rows": arguments.rows,
                "vocab": arguments.vocab,
                "history_tokens": arguments.history,
                "rounds": arguments.rounds,
                "threads": torch.get_num_threads(),
                **provenance(),
            }
            shown = ("logits", "case", "ms_per_step", "times_greedy", "times_torch_argmax")
            print(json.dumps({key: line[key] for key in shown}))
            append(arguments.output_file, line)


def random_logits(distribution: str, n_rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(n_rows, vocab_size, generator=generator)
    if distribution == "flat":
        return logits
    logits *= 3.0
    if distribution == "peaked":
        raised = torch.randint(vocab_size, (n_rows, 40), generator=generator)
        logits.scatter_add_(1, raised, 8.0 + 8.0 * torch.rand(n_rows, 40, generator=generator))
    return logits


def ratio(own: list[float], other: list[float]) -> float:
    return round(median(mine / theirs for mine, theirs in zip(own, other, strict=True)), 2)


def build_cases(logits: Tensor, n_history: int, n_steps: int) -> dict[str, Callable[[], object]]:
    """Returns functions by case name, each of which samples one step and can be called ``n_steps`` times."""
    n_rows, vocab_size = logits.shape
    rng = Random(2)
    histories = [
        History(array("i", (rng.randrange(vocab_size) for _ in range(n_history))).tobytes(), n_history // 2)
        for _ in range(n_rows)
    ]
    biases = [
        tuple((token, rng.uniform(-5.0, 5.0)) for token in rng.sample(range(vocab_size), N_BIASES))
        for _ in range(n_rows)
    ]
    penalised = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
    everything = replace(DRAWN, top_k=50, top_p=0.9, min_p=0.05, banned=(2, 3, 4), n_logprobs=20, **penalised)
    plans = {
        "greedy": [GREEDY] * n_rows,
        "temperature": [DRAWN] * n_rows,
        "top_k": [replace(DRAWN, top_k=50)] * n_rows,
        "top_p": [replace(DRAWN, top_p=0.9)] * n_rows,
        "min_p": [replace(DRAWN, min_p=0.05)] * n_rows,
        "penalties": [replace(DRAWN, **penalised, history=history) for history in histories],
        "logit_bias": [replace(DRAWN, logit_bias=bias) for bias in biases],
        "logprobs": [replace(DRAWN, n_logprobs=20)] * n_rows,
        "all": [
            replace(everything, logit_bias=bias, history=history)
            for bias, history in zip(biases, histories, strict=True)
        ],
    }
    cases: dict[str, Callable[[], object]] = {"torch_argmax": lambda: logits.argmax(-1)}
    return cases | {name: stepper(logits, rows, n_steps) for name, rows in plans.items()}


def stepper(logits: Tensor, first: list[RowSampling], n_steps: int) -> Callable[[], object]:
    """Samples a first step with ``first`` and returns a function that samples one of ``n_steps`` further steps."""
    sampler, batch_slots = Sampler(*logits.shape), range(len(logits))
    rows = [replace(row, seed=batch_slot) for batch_slot, row in zip(batch_slots, first, strict=True)]
    has_own_logits = any(map(has_edits, rows))  # which the sampler overwrites
    sampler.sample(logits.clone(), batch_slots, rows)
    steps = iter([[replace(row, index=index, history=None) for row in rows] for index in range(1, 1 + n_steps)])
    return lambda: sampler.sample(logits.clone() if has_own_logits else logits, batch_slots, next(steps))


def measure(cases: dict[str, Callable[[], object]], n_rounds: int) -> dict[str, list[float]]:
    """Returns milliseconds of each case in each round, after one warm-up round."""
    times_ms: dict[str, list[float]] = {name: [] for name in cases}
    with torch.inference_mode():
        for is_measured in [False] + [True] * n_rounds:
            for name, step in cases.items():
                begun = time.perf_counter()
                step()
                if is_measured:
                    times_ms[name].append((time.perf_counter() - begun) * 1e3)
    return times_ms


if __name__ == "__main__":
    main()
