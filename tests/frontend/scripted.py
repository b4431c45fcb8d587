"""A runtime whose answers are known: it echoes the prompt, over and over. The process entry is the real one."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from array import array
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from radixkv.frontend.client import Client
from radixkv.wire import (
    WIRE_VERSION,
    Cancel,
    Done,
    Drain,
    Failed,
    Flush,
    Flushed,
    FromRuntime,
    GetStats,
    NewTokens,
    Ready,
    Stats,
    Submit,
    Tokens,
)

EOS = 256
VOCAB_SIZE = 300
MAX_MODEL_LEN = 512
FAILS_AT_ONCE = 280
FAILS_AFTER_THREE = 281
GARBAGE = 282
KILLS = 283


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: token i stands for byte i of the byte-level alphabet, 256 ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))


@dataclass
class _Running:
    submit: Submit
    prompt: list[int]
    n: int = 0


@dataclass
class ScriptedLoop:
    """Stands where ``runtime.loop.Loop`` does."""

    step_s: float = 0.0
    is_held: bool = False
    may_fail: bool = True
    """False: a request that is to fail after three tokens waits there."""
    running: dict[str, _Running] = field(default_factory=dict)
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    @property
    def ready(self) -> Ready:
        return Ready(WIRE_VERSION, VOCAB_SIZE, MAX_MODEL_LEN, 16, 64)

    @property
    def has_work(self) -> bool:
        return bool(self.running) and not self.is_held

    def receive(self, message: Submit | Cancel | Flush | GetStats | Drain) -> list[FromRuntime]:
        match message:
            case Submit():
                self.submitted.append(message)
                prompt = array("i", message.tokens).tolist()
                if prompt[0] == FAILS_AT_ONCE:
                    return [Failed(message.id, "queue_full", "as many requests wait as may", None)]
                self.running[message.id] = _Running(message, prompt)
            case Cancel():
                self.cancelled.append(message.id)
                if (request := self.running.pop(message.id, None)) is not None:
                    return [self._done(request, "abort")]
            case Flush():
                return [Flushed(message.id, 3, 2)]
            case GetStats():
                return [self._stats(message.id)]
        return []

    def turn(self) -> list[FromRuntime]:
        time.sleep(self.step_s)
        items: list[NewTokens] = []
        ends: list[FromRuntime] = []
        for request_id, request in list(self.running.items()):
            token = request.prompt[request.n % len(request.prompt)]
            if request.prompt[0] == FAILS_AFTER_THREE and request.n == 3:
                if not self.may_fail:
                    continue
                ends.append(Failed(request_id, "numerical_error", "the model gave NaN", None))
            elif request.prompt[0] == KILLS and request.n == 3:
                raise RuntimeError("scripted\ndeath")
            request.n += 1
            sampling = request.submit.sampling
            items.append(NewTokens(request_id, token.to_bytes(4, "little")))
            if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
                ends.append(self._done(request, "stop", token))
            elif request.n == sampling.max_tokens:
                ends.append(self._done(request, "length"))
        for end in ends:
            self.running.pop(end.id, None)
        return [Tokens(items), *ends]

    def check(self) -> None:
        assert all(request.n >= 0 for request in self.running.values())

    def _done(self, request: _Running, reason: str, token: int | None = None) -> Done:
        n_prompt = len(request.prompt)
        return Done(request.submit.id, reason, n_prompt, request.n, n_prompt // 2, 0.25, token)

    def _stats(self, stats_id: str) -> Stats:
        return Stats(
            id=stats_id,
            n_running=len(self.running),
            n_waiting=7,
            n_pages=64,
            n_pages_free=32,
            n_pages_evictable=16,
            prefix_queries_total=100,
            prefix_hits_total=40,
            prompt_tokens_total=100,
            generation_tokens_total=50,
            preemptions_total=1,
            pages_evicted_total=2,
            steps_total=9,
            step_seconds=1.5,
            schedule_seconds=0.5,
            cache_seconds=0.25,
            frames_dropped_total=0,
        )


@dataclass
class Site:
    """App, client and scripted runtime, over real sockets."""

    http: httpx.Client
    port: int
    loop: ScriptedLoop
    client: Client
    events: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.events).result(timeout=20)


def run_as_process(loop: ScriptedLoop) -> int:
    """The real process entry, around a scripted loop."""
    checkpoints = types.ModuleType("radixkv.checkpoints")
    checkpoints.resolve = lambda folder: folder
    module = types.ModuleType("radixkv.runtime.loop")
    module.build_loop = lambda config, checkpoint: loop
    sys.modules |= {"radixkv.checkpoints": checkpoints, "radixkv.runtime.loop": module}
    from radixkv.runtime.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run_as_process(ScriptedLoop(step_s=float(sys.argv[1]))))
