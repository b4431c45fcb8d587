"""A runtime of which only the times are modelled: how long its steps take, and what of a prompt they compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from radixkv.lab.simulator.step_time import StepTime

_PAGE_TOKENS = 16
_TOKEN_BYTES = 4
_MAX_TOKENS = 8192
"""Most tokens of a step."""
_MAX_ROWS = 512


@dataclass
class ModelledPrompt:
    """A prompt in flight."""

    tokens: bytes
    n_output: int
    pages: Sequence[int]
    """Chained digests of its whole pages."""
    n_left: int = 0
    """Prompt tokens that are still to be computed."""
    n_generated: int = 0

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES


@dataclass
class ModelledSteps:
    """Plans steps: takes prompts in order, but lets one wait whose next page another one computes. Never evicts."""

    times: StepTime = field(default=StepTime())
    n_prompts: int = 0
    """Prompts so far."""
    n_prompt_tokens: int = 0
    n_computed: int = 0
    """Prompt tokens that were no hits."""
    n_generated: int = 0
    _waiting: deque[ModelledPrompt] = field(default_factory=deque)
    _running: list[ModelledPrompt] = field(default_factory=list)
    _cached: set[int] = field(default_factory=set)
    _under_way: set[int] = field(default_factory=set)
    """Pages that running prompts compute."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, tokens: bytes, n_output: int) -> ModelledPrompt:
        """Queues a prompt, of little-endian int32 ids, for an answer of ``n_output`` tokens. O(tokens)."""
        prompt = ModelledPrompt(tokens, n_output, _pages_of(tokens))
        self.n_prompts += 1
        self.n_prompt_tokens += prompt.n_tokens
        self._waiting.append(prompt)
        return prompt

    def cancel(self, prompt: ModelledPrompt) -> None:
        """Ends a prompt between two steps."""
        if prompt in self._running:
            self._end(prompt)
        elif prompt in self._waiting:
            self._waiting.remove(prompt)

    def n_cached(self, tokens: bytes) -> int:
        """Returns how many of a prompt's tokens are cached. O(tokens)."""
        return _PAGE_TOKENS * _n_leading(_pages_of(tokens), self._cached)

    def plan(self) -> tuple[float, list[ModelledPrompt]]:
        """Plans the next step; returns how long it takes, and the prompts that it gives a token."""
        room = _MAX_TOKENS - sum(not prompt.n_left for prompt in self._running)
        self._admit(room)
        n_planned = 0
        for prompt in self._running:
            n_now = min(prompt.n_left, room - n_planned)
            prompt.n_left -= n_now
            n_planned += n_now
        self.n_computed += n_planned
        rows = [prompt for prompt in self._running if not prompt.n_left]
        return self.times.seconds(n_planned, len(rows)), rows

    def finish(self, rows: Sequence[ModelledPrompt]) -> None:
        """Gives each of a step's prompts its token, and ends those with a whole answer."""
        for prompt in rows:
            if not prompt.n_generated:
                self._cached.update(prompt.pages)
                self._under_way.difference_update(prompt.pages)
            prompt.n_generated += 1
            self.n_generated += 1
            if prompt.n_generated == prompt.n_output:
                self._end(prompt)

    def _admit(self, room: int) -> None:
        room -= sum(prompt.n_left for prompt in self._running)
        n_rows = _MAX_ROWS - len(self._running)
        later: deque[ModelledPrompt] = deque()
        while self._waiting and n_rows > 0 and room > 0:
            prompt = self._waiting.popleft()
            n_cached = _n_leading(prompt.pages, self._cached)
            if n_cached < len(prompt.pages) and prompt.pages[n_cached] in self._under_way:
                later.append(prompt)
                continue
            prompt.n_left = prompt.n_tokens - min(_PAGE_TOKENS * n_cached, prompt.n_tokens - 1)
            self._under_way.update(prompt.pages[n_cached:])
            self._running.append(prompt)
            room -= prompt.n_left
            n_rows -= 1
        self._waiting.extendleft(reversed(later))

    def _end(self, prompt: ModelledPrompt) -> None:
        self._running.remove(prompt)
        self._under_way.difference_update(prompt.pages)


def _pages_of(tokens: bytes) -> list[int]:
    state, pages = xxhash.xxh3_64(), []
    n_bytes = _PAGE_TOKENS * _TOKEN_BYTES
    for start in range(0, len(tokens) - n_bytes + 1, n_bytes):
        state.update(tokens[start : start + n_bytes])
        pages.append(state.intdigest())
    return pages


def _n_leading(pages: Sequence[int], known: set[int]) -> int:
    return next((n for n, page in enumerate(pages) if page not in known), len(pages))
