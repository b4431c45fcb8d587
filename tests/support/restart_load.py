"""Clients that ask a server without pause while its runtime is killed, and look at how each request ends."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from support.live import LIMIT_S, LiveServer

RUNTIME_CODES = {"runtime_died", "runtime_restarting"}


@dataclass
class Endings:
    """How requests ended: ``complete``, a code of ``RUNTIME_CODES``, or else what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)

    def wrong(self) -> set[str]:
        return {ending for ending in self.counts if ending not in {"complete", *RUNTIME_CODES}}


def ending_of(status: int, body: str, is_stream: bool) -> str:
    """Returns how a request ended, by its whole response."""
    if status == 503 and "error" in body:
        return json.loads(body)["error"]["code"]
    if status != 200:
        return f"status {status}: {body}"
    if not is_stream:
        (choice,) = json.loads(body)["choices"]
        return "complete" if choice["finish_reason"] == "length" else f"wrong: {body}"
    *events, done, end = body.split("\n\n")
    if (done, end) != ("data: [DONE]", "") or "data: [DONE]" in events:
        return f"not one end of a stream: {body}"
    parsed: list[dict[str, Any]] = [json.loads(event.removeprefix("data: ")) for event in events]
    codes = [event["error"]["code"] for event in parsed if "error" in event]
    reasons = [choice["finish_reason"] for event in parsed for choice in event.get("choices", ())]
    n_finished = sum(reason is not None for reason in reasons)
    if len(codes) + n_finished != 1 or (codes and "error" not in parsed[-1]):
        return f"not one ending: {body}"
    return codes[0] if codes else "complete"


@contextmanager
def asking(server: LiveServer, *bodies: dict[str, Any]) -> Iterator[Endings]:
    """Sends each body again and again from a thread of its own, until the context ends."""
    endings, is_over = Endings(), threading.Event()

    def ask(body: dict[str, Any]) -> None:
        with httpx.Client(base_url=server.base_url, timeout=LIMIT_S) as http:
            while not is_over.is_set():
                try:
                    reply = http.post("/v1/completions", json=body)
                    ending = ending_of(reply.status_code, reply.text, body.get("stream", False))
                except httpx.HTTPError as error:
                    ending = repr(error)
                endings.counts[ending] += 1
                if ending != "complete":
                    time.sleep(0.1)

    threads = [threading.Thread(target=ask, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield endings
    finally:
        is_over.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "a request hangs"
