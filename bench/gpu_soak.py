"""A soak test: thousands of requests of all kinds through one engine on a GPU.

The model is small (random weights) and the pool too small for the running requests, so that pages are evicted and
requests preempted all the time. Requests share prefixes, have several choices, are sampled or greedy, and use
logprobs, penalties and biases. Some are cancelled at any moment, waiting or running. The load pauses after
every ``--every`` requests. Then each request must have ended exactly once; free and evictable pages must add up to
the pool; the invariants of pages and tree must hold; a greedy answer must be the same as at first, and from host
memory the same as from the device; and the GPU's memory must not have grown since the first pause. Appends one JSON
line.

    python bench/gpu_soak.py --requests 20000 --output-file bench/results/gpu_soak.jsonl
    python bench/gpu_soak.py --requests 10000 --model qwen3.5 --host-memory 0
    python bench/gpu_soak.py --requests 200 --every 50 --device cpu
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from result_lines import add_gpu_flags, report, script_parser
from shapes import SMALL, SMALL_HYBRID, SMALL_WINDOWS, write_model

from gpu import gpu_provenance
from radixkv import SamplingParams
from radixkv.checkpoints import resolve
from radixkv.runtime.loop import Loop
from radixkv.runtime.open_loop import build_loop
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.wire.cache_messages import Flush
from radixkv.wire.messages import (
    Cancel,
    Done,
    Failed,
    FromRuntime,
    GetStats,
    Submit,
    Tokens,
    pack_tokens,
    unpack_tokens,
)
from radixkv.wire.stats import Stats

MODELS = {"llama": SMALL, "qwen3.5": SMALL_HYBRID, "gemma3": SMALL_WINDOWS}
VOCAB = 32_000
MAX_TOKENS = 600
N_STEMS = 150
"""Prefixes that requests share: about as many tokens as the pool has."""
CANARY = range(100, 400)
FILLER_TOKENS = 500
MAX_COPYING_S = 10.0
CANCEL_SHARE = 0.25
"""Probability that a turn cancels a request."""
BURST_EVERY, BURST_AT, N_BURST = 1000, 200, 120
"""Bursts of requests with short prompts and long answers, which outgrow the pool."""
MAX_GROWTH_BYTES = 64 << 20
"""Allowed growth of GPU memory between pauses: logits of the longest prompt with prompt logprobs so far."""


class SoakFailed(Exception):
    """A check of the soak test failed."""


@dataclass
class Traffic:
    """Generates random requests; the same seed gives the same requests."""

    rng: Random
    kinds: Counter[str] = field(default_factory=Counter)
    n_drawn: int = 0

    def __post_init__(self) -> None:
        self._stems = [self._ids(self.rng.randint(10, 150)) for _ in range(N_STEMS)]

    def draw(self) -> tuple[list[int], SamplingParams]:
        """Returns a prompt and its sampling parameters."""
        self.n_drawn += 1
        if BURST_AT < self.n_drawn % BURST_EVERY <= BURST_AT + N_BURST:
            self.kinds["long"] += 1
            return self._ids(4), SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
        stem = self.rng.choice(self._stems) if self.rng.random() < 0.8 else []
        if self.rng.random() < 0.02:
            self._stems[self.rng.randrange(len(self._stems))] = self._ids(self.rng.randint(10, 150))
        prompt = stem + self._ids(self.rng.randint(1, 40))
        kind = self.rng.choices(("greedy", "drawn", "shaped", "scored"), (40, 30, 20, 10))[0]
        self.kinds[kind] += 1
        return prompt, SamplingParams(
            max_tokens=self.rng.randint(1, self.rng.choice((20, 60))),
            n=self.rng.choice((1, 1, 1, 1, 2, 4)),
            seed=self.rng.randrange(1000),
            ignore_eos=True,
            **self._options(kind),
        )

    def _options(self, kind: str) -> dict[str, Any]:
        match kind:
            case "drawn":
                return {"temperature": self.rng.choice((0.3, 1.0)), "top_p": 0.9, "top_k": self.rng.choice((0, 40))}
            case "shaped":
                return {
                    "temperature": 0.8,
                    "min_p": 0.01,
                    "presence_penalty": 0.5,
                    "repetition_penalty": 1.1,
                    "logit_bias": {5: -100.0, 17: 1.5},
                    "min_tokens": 1,
                    "stop_token_ids": (7, 8, 9),
                }
            case "scored":
                return {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": self.rng.choice((None, 3))}
        return {"temperature": 0.0}

    def _ids(self, n: int) -> list[int]:
        return [self.rng.randrange(10, VOCAB) for _ in range(n)]


@dataclass
class Soak:
    """A runtime loop under load, and its checks."""

    loop: Loop
    traffic: Traffic
    n_clients: int
    n_on_device: int = 0
    live: set[str] = field(default_factory=set)
    ends: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    canary: list[int] = field(default_factory=list)

    def run(self, n_requests: int, every: int) -> None:
        """Sends all requests, with checks after each ``every``. Raises ``SoakFailed``."""
        rng = self.traffic.rng
        while self.n_on_device < n_requests:
            goal = min(self.n_on_device + every, n_requests)
            while self.n_on_device < goal or self.loop.has_work:
                while self.n_on_device < goal and len(self.live) < self.n_clients:
                    self._send()
                if self.loop.is_waiting:
                    self.loop.wait(1.0)
                self._take(self.loop.turn())
                if self.live and rng.random() < CANCEL_SHARE:
                    self._take(self.loop.receive(Cancel(rng.choice(sorted(self.live)))))
            self._check()

    def _send(self) -> None:
        prompt, sampling = self.traffic.draw()
        name = f"r{self.n_on_device}"
        self.n_on_device += 1
        self.live.add(name)
        self._take(self.loop.receive(Submit(name, pack_tokens(prompt), sampling)))

    def _take(self, messages: list[FromRuntime]) -> None:
        for message in messages:
            match message:
                case Tokens():
                    if ended := {item.id for item in message.items} - self.live:
                        raise SoakFailed(f"tokens for {ended}, which had ended")
                case Done() | Failed():
                    if message.id not in self.live:
                        raise SoakFailed(f"a second terminal message for {message.id}: {message}")
                    if isinstance(message, Failed):
                        raise SoakFailed(f"{message.id} failed with {message.code}: {message.text}")
                    self.live.remove(message.id)
                    self.ends[message.finish_reason] += 1

    def _check(self) -> None:
        if self.live:
            raise SoakFailed(f"the loop is idle, but {sorted(self.live)[:5]} have not ended")
        if sum(self.ends.values()) != self.n_on_device:
            raise SoakFailed(f"{self.n_on_device} requests, but {dict(self.ends)} ends")
        self._end_copies()
        self.loop.check()
        stats = self._stats()
        if stats.n_pages_free + stats.n_pages_evictable != stats.n_pages:
            raise SoakFailed(f"free and evictable pages are not the pool: {stats}")
        self._check_canary()
        if stats.host is not None:
            self._check_loaded_canary()
        used, reserved = gpu_bytes()
        sample = {"requests": self.n_on_device, "gpu_used_bytes": used, "torch_reserved_bytes": reserved}
        print(json.dumps(sample), flush=True)
        if self.samples and used > self.samples[0]["gpu_used_bytes"] + MAX_GROWTH_BYTES:
            raise SoakFailed(f"the GPU's memory has grown from {self.samples[0]} to {sample}")
        self.samples.append(sample)

    def _check_canary(self) -> None:
        """Checks a greedy answer, computed alone with an empty cache, so that its bits are the same each time."""
        self.loop.receive(Flush("flush"))
        _, tokens = self._answer(CANARY)
        if self.canary and tokens != self.canary:
            raise SoakFailed(f"after {self.n_on_device} requests the canary is {tokens}, not {self.canary}")
        self.canary = tokens

    def _check_loaded_canary(self) -> None:
        """Checks that the canary's answer from the host tier is the one from the same pages on the device.

        Both times only the prompt's last tokens are computed, so that the bits are the same.
        """
        _, from_device = self._answer(CANARY)
        rng, ready = Random(self.n_on_device), self.loop.ready
        for _ in range(2 * ready.n_pages * ready.page_size // FILLER_TOKENS):  # until the device has evicted it
            self._answer([rng.randrange(10, VOCAB) for _ in range(FILLER_TOKENS)])
        done, from_host = self._answer(CANARY)
        if not done.cache_use.n_loaded:
            raise SoakFailed(f"after {self.n_on_device} requests the canary was not loaded: {done}")
        if from_host != from_device:
            raise SoakFailed(f"the canary is {from_host} from host memory, and {from_device} from the device")

    def _answer(self, prompt: Sequence[int]) -> tuple[Done, list[int]]:
        """Returns the end and the tokens of a greedy answer, alone on the device."""
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        messages = self.loop.receive(Submit("alone", pack_tokens(prompt), sampling))
        while self.loop.has_work:
            if self.loop.is_waiting:
                self.loop.wait(1.0)
            messages += self.loop.turn()
        self._end_copies()
        tokens = b"".join(item.tokens for one in messages if isinstance(one, Tokens) for item in one.items)
        (done,) = (one for one in messages if isinstance(one, Done))
        return done, unpack_tokens(tokens)

    def _end_copies(self) -> None:
        """Waits until the stores that began have ended and given their pages back."""
        end = time.monotonic() + MAX_COPYING_S
        stats = self._stats()
        while stats.n_pages_free + stats.n_pages_evictable < stats.n_pages and time.monotonic() < end:
            self.loop.wait(0.01)
            self.loop.advance()
            stats = self._stats()

    def _stats(self) -> Stats:
        (stats,) = self.loop.receive(GetStats("stats"))
        assert isinstance(stats, Stats)
        return stats

    def line(self) -> dict[str, Any]:
        """Returns the result line."""
        stats = self._stats()
        names = ("generation_tokens_total", "prefix_hits_total", "pages_evicted_total", "preemptions_total")
        return {
            "case": "gpu_soak",
            "requests": self.n_on_device,
            "ends": dict(self.ends),
            "kinds": dict(self.traffic.kinds),
            **{name: getattr(stats, name) for name in names},
            "steps": stats.steps_total,
            "host": None if stats.host is None else msgspec.structs.asdict(stats.host),
            "samples": self.samples,
        }


def gpu_bytes() -> tuple[int, int]:
    """Returns the GPU's bytes in use by all processes, and those reserved by torch; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved()


def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser)
    parser.add_argument("--model", choices=MODELS, default="llama", help="a small version of this")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--attention-backend", default="auto", metavar="NAME")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--pool-tokens", type=int, default=8192)
    parser.add_argument("--host-memory", type=int, default=64 << 20, metavar="BYTES", help="host tier; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(MODELS[arguments.model], Path(folder)))
        config = EngineConfig(
            ModelConfig(
                model,
                dtype="bfloat16",
                max_model_len=MAX_TOKENS,
                load_format="dummy",
                device=arguments.device,
                attention_backend=arguments.attention_backend,
            ),
            CacheConfig(
                max_total_tokens=arguments.pool_tokens,
                host_memory_bytes=arguments.host_memory or None,
                load_policy="always",
            ),
            SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=2048),
        )
        loop = build_loop(config, resolve(model, load_format="dummy"))
    begun = time.monotonic()
    soak = Soak(loop, Traffic(Random(arguments.seed)), arguments.clients)
    soak.run(arguments.requests, arguments.every)
    line = {"model": arguments.model} | soak.line() | {"duration_s": round(time.monotonic() - begun, 1)}
    report(arguments.output_file, line, gpu_provenance(arguments.device, arguments.commit))


if __name__ == "__main__":
    main()
