"""Conversations that are sent to servers or to the router before them."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from random import Random
from typing import Any

import httpx

WORDS = "river stone cloud apple green slow seven window paper light moon salt iron leaf road winter".split()
REQUEST_LIMIT_S = 120.0


class Load:
    """Conversations of several turns, whose requests are sent turn by turn.

    Args:
        n_sessions: conversations; they begin with the same 20 words.
        n_turns: requests of each, each with 90 words more.
    """

    def __init__(self, n_sessions: int, n_turns: int) -> None:
        random = Random(0)

        def text(n_words: int) -> str:
            return " ".join(random.choices(WORDS, k=n_words))

        head = text(20)
        parts = [[text(90) for _ in range(n_turns)] for _ in range(n_sessions)]
        self.turns = [
            [" ".join([head, f"session {n}", *parts[n][: turn + 1]]) for n in range(n_sessions)]
            for turn in range(n_turns)
        ]

    def hit_rate(self, addresses: Sequence[str], *, key: str = "", concurrency: int = 4) -> float:
        """Sends all requests, to each address in turn; returns cached tokens as a share of prompt tokens."""
        targets, lock = cycle(addresses), threading.Lock()
        counts: Counter[str] = Counter()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with (
            httpx.Client(timeout=REQUEST_LIMIT_S, headers=headers) as http,
            ThreadPoolExecutor(concurrency) as pool,
        ):

            def send(prompt: str) -> None:
                with lock:
                    address = next(targets)
                reply = http.post(f"{address}/v1/completions", json=body(prompt))
                assert reply.status_code == 200, reply.text
                usage = reply.json()["usage"]
                with lock:
                    counts["prompt"] += usage["prompt_tokens"]
                    counts["cached"] += usage["prompt_tokens_details"]["cached_tokens"]

            for turn in self.turns:
                list(pool.map(send, turn))
        return counts["cached"] / counts["prompt"]


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    """Returns the body of a short completion."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}


def ending(address: str, prompt: str, *, stream: bool, max_tokens: int = 24) -> str:
    """Sends a request and returns how it ended: ``complete``, ``error``, or what is wrong with its end."""
    fields = body(prompt, stream=stream, max_tokens=max_tokens)
    try:
        with (
            httpx.Client(timeout=REQUEST_LIMIT_S) as http,
            http.stream("POST", f"{address}/v1/completions", json=fields) as reply,
        ):
            text = reply.read().decode()
    except httpx.TransportError as error:
        return f"connection lost: {error!r}"
    if reply.status_code != 200:
        return "error" if "error" in json.loads(text) else f"no error in {text}"
    if not stream:
        return "complete" if json.loads(text)["choices"][0]["finish_reason"] == "length" else f"cut: {text}"
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    if events[-1:] != ["[DONE]"]:
        return f"no end: {text[-200:]}"
    last = json.loads(events[-2])
    if "error" in last:
        return "error"
    return "complete" if last["choices"][0]["finish_reason"] == "length" else f"cut: {text[-200:]}"


class Traffic:
    """Requests of several clients, one after another, until ``stop``; every second client streams."""

    def __init__(self, address: str, prompts: Sequence[str], n_clients: int = 6) -> None:
        self.endings: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._prompts = cycle(prompts)
        self._threads = [
            threading.Thread(target=self._run, args=(address, bool(n % 2)), daemon=True) for n in range(n_clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, address: str, stream: bool) -> None:
        while not self._stopped.is_set():
            with self._lock:
                prompt = next(self._prompts)
            how = ending(address, prompt, stream=stream)
            with self._lock:
                self.endings[how] += 1

    def stop(self) -> Counter[str]:
        """Waits for the requests in flight; returns how many ended in which way."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        return self.endings
