"""Sends thousands of requests of all kinds to one real server; checks that no memory, page or file leaks.

Appends one JSON line. The server is `radixkv serve` with the embedded model. Requests are drawn from a seed: texts
and token ids of many lengths, new and shared prefixes, chats, streams, several choices, logprobs, penalties, stop
strings, salts, clients that disconnect early, and invalid requests. The load pauses every 500 requests. Then no
request may be running or waiting, all pages must be free or evictable, and a greedy output must equal the first
one. Memory and open files of both processes are recorded.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from result_lines import report, script_parser
from server import FLAGS, counters, processes, resident_bytes

from radixkv.client.errors import StatusError
from radixkv.client.http import HTTPClient
from radixkv.lab.bench.environment import provenance
from radixkv.processes.server_process import running_server

CANARY = {
    "prompt": "Question: what is 2 + 2?\nAnswer:",
    "max_tokens": 12,
    "temperature": 0,
    "return_token_ids": True,
}
SHARED = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n"
BAD = (
    {"temperature": -1},
    {"n": 0},
    {"prompt": [-1]},
    {"prompt": [1 << 20]},
    {"max_tokens": 1 << 20},
    {"stop": [""]},
    {"logit_bias": {"x": 1}},
    {"best_of": 3},
)
MAX_IDLE_WAIT_S = 10.0


class SoakFailed(Exception):
    """Requests or pages are left, a response is wrong, or the greedy output has changed."""


@dataclass
class Traffic:
    """Draws random requests; the same seed gives the same requests."""

    rng: Random
    drawn: Counter[str] = field(default_factory=Counter)

    def draw(self) -> tuple[str, str, dict[str, Any]]:
        """Returns the kind of client, the path and the body of a request."""
        kind = self.rng.choices(("whole", "stream", "leaves", "bad"), (50, 30, 12, 8))[0]
        is_chat = self.rng.random() < 0.25
        body = self._chat() if is_chat else self._completion()
        body |= {"max_tokens": self.rng.randint(1, 12), "temperature": self.rng.choice((0, 0.7, 1.0))}
        body |= self._options(is_chat=is_chat)
        if kind in ("stream", "leaves"):
            body["stream"] = True
        if kind == "leaves":
            body |= {"max_tokens": 400, "ignore_eos": True}
        if kind == "bad":
            is_chat, body = False, {"prompt": "Hello"} | self.rng.choice(BAD)
        self.drawn[f"{kind} {'chat' if is_chat else 'completion'}"] += 1
        return kind, "/v1/chat/completions" if is_chat else "/v1/completions", body

    def _completion(self) -> dict[str, Any]:
        n_shared = self.rng.randint(0, 12)
        text = SHARED * n_shared + f"Question: what is {self.rng.randrange(10_000)} + 1?\nAnswer:"
        ids = [self.rng.randrange(10, 3000) for _ in range(self.rng.choice((1, 15, 16, 17, 90, 300)))]
        return {"prompt": self.rng.choice((text, text, ids, [text, f"{SHARED}{text}"]))}

    def _chat(self) -> dict[str, Any]:
        turns = [
            {"role": role, "content": f"{SHARED}{self.rng.randrange(50)}"}
            for _ in range(self.rng.randint(0, 3))
            for role in ("user", "assistant")
        ]
        return {"messages": [*turns, {"role": "user", "content": f"And {self.rng.randrange(1000)} + 1?"}]}

    def _options(self, *, is_chat: bool) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.rng.random() < 0.2:
            options["n"] = self.rng.randint(2, 3)
        if self.rng.random() < 0.2:
            options |= {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
        if self.rng.random() < 0.2:
            options |= {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {"5": -100}}
        if self.rng.random() < 0.2:
            options["stop"] = ["e", "\n\n"]
        if self.rng.random() < 0.2:
            options["seed"] = self.rng.randrange(100)
        if self.rng.random() < 0.15:
            options["cache_salt"] = f"tenant {self.rng.randrange(3)}"
        if self.rng.random() < 0.15:
            options |= {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 3}
        return options


@dataclass
class Soak:
    """Runs the traffic against a server and records samples."""

    http: HTTPClient
    pids: tuple[int, int]
    traffic: Traffic
    canary: list[int] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, n_requests: int, every: int, n_clients: int) -> None:
        """Sends all requests, and checks the server after each ``every`` of them. Raises ``SoakFailed``."""
        self.canary = await self._canary_output()
        for start in range(0, n_requests, every):
            remaining = iter(range(min(every, n_requests - start)))
            await asyncio.gather(*(self._client(remaining) for _ in range(n_clients)))
            await self._check_idle(min(start + every, n_requests))

    async def _client(self, remaining: Any) -> None:
        for _ in remaining:
            kind, path, body = self.traffic.draw()
            expected = 400 if kind == "bad" else 200
            status, content = await self._send(path, body, leaves=kind == "leaves")
            if status != expected:
                raise SoakFailed(f"{status} instead of {expected} for {body}: {content!r}")
            if kind == "stream" and not content.endswith(b"[DONE]\n\n"):
                raise SoakFailed(f"a stream ended without its end: {content[-200:]!r}")

    async def _send(self, path: str, body: dict[str, Any], *, leaves: bool) -> tuple[int, bytes]:
        """Returns status and content of the reply; disconnects after its first bytes if the client ``leaves``."""
        content = b""
        async with aclosing(self.http.stream(path, msgspec.json.encode(body))) as pieces:
            try:
                async for piece in pieces:
                    content += piece
                    if leaves:
                        break
            except StatusError as error:
                return error.status, error.text.encode()
        return 200, content

    async def _check_idle(self, n_done: int) -> None:
        deadline = time.monotonic() + MAX_IDLE_WAIT_S
        while not await self._is_idle():
            if time.monotonic() > deadline:
                raise SoakFailed(f"after {n_done} requests pages or requests are left: {await self._counters()}")
            await asyncio.sleep(0.05)
        if (canary := await self._canary_output()) != self.canary:
            raise SoakFailed(f"after {n_done} requests the canary says {canary}, not {self.canary}")
        frontend, runtime = self.pids
        sample = {
            "requests": n_done,
            "frontend_bytes": resident_bytes(frontend),
            "runtime_bytes": resident_bytes(runtime),
            "frontend_files": len(list(Path(f"/proc/{frontend}/fd").iterdir())),
            "runtime_files": len(list(Path(f"/proc/{runtime}/fd").iterdir())),
        }
        print(json.dumps(sample), flush=True)
        self.samples.append(sample)

    async def _is_idle(self) -> bool:
        now = await self._counters()
        is_quiet = now["num_requests_running"] == now["num_requests_waiting"] == 0
        return is_quiet and now["kv_pages_free"] + now["kv_pages_evictable"] == now["kv_pages"]

    async def _counters(self) -> dict[str, float]:
        return counters(await self.http.request("GET", "/metrics"))

    async def _canary_output(self) -> list[int]:
        response = await self.http.request("POST", "/v1/completions", msgspec.json.encode(CANARY))
        return list(msgspec.json.decode(response)["choices"][0]["token_ids"])

    async def line(self) -> dict[str, Any]:
        """Returns the result line. Growth is from the first sample to the last."""
        first, last, now = self.samples[0], self.samples[-1], await self._counters()
        growth = {
            f"{side}_growth_pct": round(100 * (last[f"{side}_bytes"] / first[f"{side}_bytes"] - 1), 2)
            for side in ("frontend", "runtime")
        }
        names = (
            "generation_tokens_total",
            "prefix_cache_hits_total",
            "pages_evicted_total",
            "num_preemptions_total",
        )
        return {
            "case": "soak",
            "requests": last["requests"],
            "kinds": dict(sorted(self.traffic.drawn.items())),
            **growth,
            **{name: now[name] for name in names},
            "samples": self.samples,
        }


async def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    async with running_server(FLAGS) as address, HTTPClient(address, silence_limit_s=120.0) as http:
        soak = Soak(http, processes(address), Traffic(Random(arguments.seed)))
        await soak.run(arguments.requests, arguments.every, arguments.clients)
        line = await soak.line()
    line["duration_s"] = round(time.monotonic() - started, 1)
    report(arguments.output_file, line, provenance())


if __name__ == "__main__":
    asyncio.run(main())
