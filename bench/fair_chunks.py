"""Measures how long a short prompt waits behind long ones that came just before it.

Sends long prompts of random token ids to the loop, without a server, and one step later a short prompt. Prints one
JSON line: when the short prompt and the last long one had their first tokens, and when all requests had ended. Each
time is a pair, seconds of wall time and of processor time, since the long prompts were sent.

    python bench/fair_chunks.py --prompts 12 --prompt-tokens 7000 --short-tokens 24
"""

from __future__ import annotations

import random
import time

from result_lines import report, script_parser

from radixkv.checkpoints import resolve
from radixkv.lab.bench.environment import provenance
from radixkv.runtime.open_loop import build_loop
from radixkv.settings.config import EngineConfig, ModelConfig
from radixkv.wire.messages import Submit, Tokens, pack_tokens
from radixkv.wire.sampling import SamplingParams


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--short-tokens", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    loop = build_loop(EngineConfig(ModelConfig(arguments.model)), resolve(arguments.model))
    rng = random.Random(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.new_tokens, ignore_eos=True)

    def submit(name: str, n_tokens: int) -> None:
        tokens = [rng.randrange(10, loop.ready.vocab_size) for _ in range(n_tokens)]
        refused = loop.receive(Submit(name, pack_tokens(tokens), sampling))
        assert not refused, refused

    for number in range(arguments.prompts):
        submit(str(number), arguments.prompt_tokens)
    started, started_cpu = time.perf_counter(), time.process_time()
    first_tokens: dict[str, tuple[float, float]] = {}
    n_turns = 0
    while loop.has_work:
        messages = loop.turn()
        now = round(time.perf_counter() - started, 2), round(time.process_time() - started_cpu, 2)
        for message in messages:
            for item in message.items if isinstance(message, Tokens) else ():
                first_tokens.setdefault(item.id, now)
        n_turns += 1
        if n_turns == 1:
            submit("short", arguments.short_tokens)
    short = first_tokens.pop("short")
    result = {
        "short_first_token_s": short,
        "last_long_first_token_s": max(first_tokens.values()),
        "end_s": now,
        "turns": n_turns,
    }
    settings = {name: value for name, value in vars(arguments).items() if name != "output_file"}
    report(arguments.output_file, settings | result, provenance())


if __name__ == "__main__":
    main()
