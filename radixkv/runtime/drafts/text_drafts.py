"""``TextDrafts``: drafts that texts suggest, as many as measured times say are worth checking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter
from typing import NamedTuple

from radixkv.runtime.drafts.acceptance import Acceptance
from radixkv.runtime.drafts.own_text import continue_text
from radixkv.runtime.drafts.step_costs import StepCosts, bucket
from radixkv.runtime.protocols import Drafts
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import StepPlan
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.stats import DraftStats

_MIN_CHANCE = 0.05
"""Less likely drafts are not considered."""
_MIN_GAIN = 1.05
"""Tokens a second with drafts, relative to those without, above which steps begin to wait for results."""
_MIN_KEPT_GAIN = 1.02
"""The same measured, below which they stop to wait."""
_N_TRIED = 16
"""Steps that wait before their gain is judged."""
_GAIN_DECAY = 15 / 16
_LOOK_EVERY = 8
"""Without drafts, one step in so many looks what they would have been."""
_N_LOOKED_AT = 8
"""Rows that such a step looks at."""
_LOOK_WEIGHT = 1 / 4
_N_PAUSED = 5
"""Steps that do not wait, from time to time: the first two are not measured."""
_PAUSE_EVERY = 256


class _Guess(NamedTuple):
    """What was guessed for a row, until it is compared with what came."""

    request: Request
    n_known: int
    """Bytes of the request's tokens that were known."""
    kind: int
    tokens: bytes


class TextDrafts(Drafts):
    """Drafts what followed when the last tokens of a request came before in its prompt or answer.

    A step has the drafts with which the expected tokens a second are the most, by the chances of each kind of guess
    and the time of steps with so many rows. Both are learned from what comes, whether or not it was drafted.

    Where the device overlaps with the host, drafts cost that overlap: a plan with drafts waits for the result
    before it. So they begin when guesses that are only compared promise a gain, and end when none is measured.

    Args:
        config: lengths of drafts and of matches.
        overlaps: whether the device computes beside the host.
        clock: seconds, monotonic.
    """

    def __init__(
        self, config: SpeculativeConfig, *, overlaps: bool, clock: Callable[[], float] = perf_counter
    ) -> None:
        low, high = config.prompt_lookup_min, config.prompt_lookup_max
        self._sizes = tuple(sorted({low, (low + high) // 2, high}))
        self._max_drafts = config.num_speculative_tokens
        self._overlaps = overlaps
        self._clock = clock
        self._acceptance = Acceptance()
        self._costs = StepCosts(overlaps=overlaps)
        self._guesses: dict[int, _Guess] = {}
        """The last guess of each batch slot."""
        self._is_on = not overlaps
        self._n_steps = 0
        """Steps since drafts began or ended."""
        self._n_paused = 0
        self._gain = 0.0
        """Moving average of the gain that drafts promise, while they are off."""
        self._margin = 1.0
        """Grows with each time that drafts promised a gain and brought none."""
        self._tried_s, self._without_s = 0.0, 0.0
        """Decayed times of steps that waited, and of the steps without drafts for as many tokens."""
        self._ended_at, self._was_measurable, self._had_waited = 0.0, False, False
        self._n_rows, self._n_drafted, self._n_accepted = 0, 0, 0
        self._n_accepted_before = 0

    @property
    def wants_results(self) -> bool:
        """Whether drafts are on."""
        return self._is_on and not self._n_paused

    def draft(self, requests: Sequence[Request], max_drafts: Sequence[int], n_most: int) -> list[bytes]:
        """Returns what may follow the requests' tokens. O(their tokens), and O(drafts log drafts)."""
        tokens: list[bytes] = []
        chances: list[list[float]] = []
        for request, max_of_row in zip(requests, max_drafts, strict=True):
            guess = self._guess(request) if max_of_row > 0 else None
            tokens.append(b"" if guess is None else guess.tokens)
            chances.append([] if guess is None else self._chances(guess)[:max_of_row])
        counts, _ = self._choose(chances, len(requests), n_most)
        return [drafts[: n * TOKEN_BYTES] for drafts, n in zip(tokens, counts, strict=True)]

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Counts a row. O(1)."""
        self._n_rows += 1
        self._n_drafted += n_drafts
        self._n_accepted += n_accepted

    def step_done(self, plan: StepPlan, requests: Sequence[Request], *, has_waited: bool) -> None:
        """Measures the step, and decides whether the next ones have drafts.

        O(1), and in one step of some O(tokens) of a few requests.
        """
        now = self._clock()
        seconds, self._ended_at = now - self._ended_at, now
        n_rows = len(plan.rows)
        n_accepted, self._n_accepted_before = self._n_accepted - self._n_accepted_before, self._n_accepted
        is_measurable = plan.n_decode == n_rows and not plan.is_masked
        is_measured = is_measurable and self._was_measurable and has_waited == self._had_waited
        self._was_measurable, self._had_waited = is_measurable, has_waited
        waits = has_waited or not self._overlaps
        if is_measured:
            self._costs.record(n_rows + plan.n_drafts, seconds, waits=waits)
        if not self._overlaps:
            return
        self._n_steps += 1
        if not self._is_on:
            if is_measurable and self._n_steps % _LOOK_EVERY == 0:
                self._look(requests)
        elif self._n_paused:
            self._n_paused -= 1
        elif self._n_steps % _PAUSE_EVERY == 0:
            self._n_paused = _N_PAUSED
        elif is_measured and waits:
            without_s = self._costs.seconds(n_rows, waits=False) * (n_rows + n_accepted) / n_rows
            self._tried_s = self._tried_s * _GAIN_DECAY + seconds
            self._without_s = self._without_s * _GAIN_DECAY + without_s
            if self._n_steps > _N_TRIED and self._without_s < _MIN_KEPT_GAIN * self._tried_s:
                self._margin = min(2.0, 1.1 * self._margin)
                self._turn(is_on=False)

    def stats(self) -> DraftStats:
        """Returns the counters."""
        return DraftStats(self._n_rows, self._n_drafted, self._n_accepted)

    def _guess(self, request: Request) -> _Guess | None:
        """Compares the last guess for the request with what came, and makes a new one. O(tokens)."""
        slot, tokens = request.batch_slot, request.tokens
        last = self._guesses.pop(slot, None)
        if last is not None and last.request is request:
            self._learn(last)
        found = continue_text(tokens, self._sizes, self._max_drafts)
        if found is None:
            return None
        guess = _Guess(request, len(tokens), found.n_matched, found.tokens)
        self._guesses[slot] = guess
        return guess

    def _learn(self, guess: _Guess) -> None:
        came = bytes(guess.request.tokens[guess.n_known : guess.n_known + len(guess.tokens)])
        n_compared = len(came) // TOKEN_BYTES
        n_right = 0
        while n_right < n_compared and _token(came, n_right) == _token(guess.tokens, n_right):
            n_right += 1
        if n_compared:
            self._acceptance.learn(guess.kind, n_right, min(n_compared, n_right + 1))

    def _chances(self, guess: _Guess) -> list[float]:
        chances = self._acceptance.chances(guess.kind, len(guess.tokens) // TOKEN_BYTES)
        return [chance for chance in chances if chance >= _MIN_CHANCE]

    def _choose(self, chances: Sequence[Sequence[float]], n_rows: int, n_most: int) -> tuple[list[int], float]:
        """Returns how many drafts of each row to check, and the expected tokens a second of the step.

        Args:
            chances: [rows] of those with guesses, each falling.
            n_rows: all rows of the step.
            n_most: most drafts.
        """
        order = sorted(((chance, row) for row, of_row in enumerate(chances) for chance in of_row), reverse=True)
        best, best_rate = 0, n_rows / self._costs.seconds(n_rows, waits=True)
        n_tokens = float(n_rows)
        last = min(n_most, len(order))
        for n_drafts, (chance, _) in enumerate(order[:last], 1):
            n_tokens += chance
            if n_drafts == last or bucket(n_rows + n_drafts) != bucket(n_rows + n_drafts + 1):
                rate = n_tokens / self._costs.seconds(n_rows + n_drafts, waits=True)
                if rate > best_rate:
                    best, best_rate = n_drafts, rate
        counts = [0] * len(chances)
        for _, row in order[:best]:
            counts[row] += 1
        return counts, best_rate

    def _look(self, requests: Sequence[Request]) -> None:
        """Compares guesses for some of the rows with what comes; begins with drafts if they promise a gain."""
        n_rows = len(requests)
        first = self._n_steps // _LOOK_EVERY * _N_LOOKED_AT
        looked_at = [requests[(first + index) % n_rows] for index in range(min(n_rows, _N_LOOKED_AT))]
        guesses = [self._guess(request) if request.max_drafts > 0 else None for request in looked_at]
        chances = [[] if guess is None else self._chances(guess) for guess in guesses]
        n_copies = -(-n_rows // len(looked_at))
        of_all = list(chain.from_iterable([chances] * n_copies))[:n_rows]
        _, rate = self._choose(of_all, n_rows, self._max_drafts * n_rows)
        gain = rate * self._costs.seconds(n_rows, waits=False) / n_rows
        self._gain += _LOOK_WEIGHT * (gain - self._gain)
        self._margin = max(1.0, self._margin * 0.998)
        if self._gain > _MIN_GAIN * self._margin:
            self._turn(is_on=True)

    def _turn(self, *, is_on: bool) -> None:
        self._is_on, self._n_steps, self._gain = is_on, 0, 0.0
        self._tried_s = self._without_s = 0.0


def _token(tokens: bytes, index: int) -> bytes:
    return tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES]
