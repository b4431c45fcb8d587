"""Clients that send requests of all kinds without pause, and note how each one ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx
from soak import Traffic

from chaos.endings import COMPLETE, CUT, LEFT, MESSAGES, RESPONSES, WrongEnding, ending_of, ending_of_agents
from support.live import LIMIT_S, wait_for

N_CLIENTS = 8
PAUSE_S = 0.1
"""Wait of a client whose request has failed."""
_SHARED_FIELDS = {name: name for name in ("temperature", "top_p", "cache_salt", "stream")}
MESSAGES_FIELDS = _SHARED_FIELDS | {
    "messages": "messages",
    "max_tokens": "max_tokens",
    "top_k": "top_k",
    "stop": "stop_sequences",
}
RESPONSES_FIELDS = _SHARED_FIELDS | {"messages": "input", "max_tokens": "max_output_tokens"}
"""Fields of chats with their names in the other APIs; the others are refused there."""
SHARED = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer: 7.\n"


class Clients:
    """Sends requests from threads while ``asking``.

    Args:
        rng: draws the requests.
    """

    def __init__(self, rng: Random) -> None:
        self.kinds: Counter[str] = Counter()
        """How many requests of each kind and path were sent, over all time."""
        self._traffic = Traffic(rng)
        self._rng = rng
        self._lock = threading.Lock()
        self._endings: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._is_over = threading.Event()

    @contextmanager
    def asking(self, base_url: str) -> Iterator[None]:
        """Sends requests until the context ends, and then waits for their endings. Begins with the first answer."""
        self._is_over.clear()
        threads = [
            threading.Thread(target=self._ask_until_over, args=(base_url,), daemon=True) for _ in range(N_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: self._endings[COMPLETE] > 0 or bool(self._wrong), "no request is answered")
            yield
        finally:
            self._is_over.set()
            deadline = time.monotonic() + LIMIT_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            n_hanging = sum(thread.is_alive() for thread in threads)
        if n_hanging:
            raise WrongEnding(f"{n_hanging} requests have no ending after {LIMIT_S:g} s")

    def take_endings(self) -> Counter[str]:
        """Returns how many requests ended in which way since the last call.

        Raises:
            WrongEnding: the first response that has no ending, or more than one.
        """
        if self._wrong:
            raise WrongEnding(self._wrong[0])
        endings, self._endings = self._endings, Counter()
        return endings

    def _ask_until_over(self, base_url: str) -> None:
        with httpx.Client(base_url=base_url, timeout=LIMIT_S) as http:
            while not self._is_over.is_set():
                with self._lock:
                    is_command = self._rng.random() < 0.1
                    kind, path, body = self._draw_command() if is_command else self._draw_request()
                    self.kinds[f"{kind} {path}"] += 1
                try:
                    ending = self._ask(http, kind, path, body)
                except httpx.HTTPError:
                    ending = CUT
                except WrongEnding as error:
                    ending = "wrong"
                    self._wrong.append(f"{path} {str(body)[:300]}: {error}")
                except Exception as error:  # a bug of this driver must not look like a request that hangs
                    ending = "wrong"
                    self._wrong.append(f"{path} {str(body)[:300]}: {error!r}")
                with self._lock:
                    self._endings[ending] += 1
                if ending not in (COMPLETE, LEFT):
                    time.sleep(PAUSE_S)

    def _draw_request(self) -> tuple[str, str, dict[str, Any]]:
        """Returns the kind of client, the path and the body. Two of three chats are of the APIs of agents."""
        kind, path, body = self._traffic.draw()
        if path == "/v1/chat/completions":
            path = self._rng.choice((path, MESSAGES, RESPONSES))
        return kind, path, agents_body(path, body)

    def _draw_command(self) -> tuple[str, str, dict[str, Any]]:
        """Returns a request about the cache, with its kind and path."""
        prompt = {"prompt": SHARED * self._rng.randint(1, 12)}
        path, body = self._rng.choice(
            (
                ("/cache/explain", prompt),
                ("/cache/match", prompt),
                ("/cache/pin", {**prompt, "ttl": "1m"}),
                ("/cache/invalidate", prompt),
                ("/cache/invalidate", {"cache_salt": f"tenant {self._rng.randrange(3)}"}),
                ("/tokenize", prompt),
                ("/generate", {"text": SHARED, "sampling_params": {"max_new_tokens": 4}}),
                ("/flush_cache", {}),
            )
        )
        return "command", path, body

    def _ask(self, http: httpx.Client, kind: str, path: str, body: dict[str, Any]) -> str:
        is_stream = body.get("stream", False)
        with http.stream("POST", path, json=body) as reply:
            if kind == "leaves" and reply.status_code == 200:
                next(reply.iter_raw())
                return LEFT
            reply.read()
        if kind == "command" and reply.status_code == 200:
            return COMPLETE
        prompt = body.get("prompt", "")
        n_prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
        n_choices = n_prompts * body.get("n", 1)
        if path in (MESSAGES, RESPONSES):
            return ending_of_agents(path, reply.status_code, reply.text, is_stream=is_stream)
        return ending_of(reply.status_code, reply.text, n_choices=n_choices, is_stream=is_stream)


def agents_body(path: str, chat: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of a chat in the form of the path's API, without what that refuses."""
    if path not in (MESSAGES, RESPONSES):
        return chat
    names = MESSAGES_FIELDS if path == MESSAGES else RESPONSES_FIELDS
    return {name: chat[field] for field, name in names.items() if field in chat}
