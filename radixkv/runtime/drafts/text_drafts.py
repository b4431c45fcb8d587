"""``TextDrafts``: drafts that a source guesses, as many as measured times say are worth checking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from time import perf_counter
from typing import NamedTuple

from radixkv.runtime.drafts.acceptance import Acceptance
from radixkv.runtime.drafts.counts import DraftCounts
from radixkv.runtime.drafts.search_pauses import SearchPauses
from radixkv.runtime.drafts.sources import Guess, Source
from radixkv.runtime.drafts.step_costs import StepCosts, bucket
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.step.plan import StepPlan
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import DraftUse
from radixkv.wire.stats import DraftStats

_MIN_CHANCE = 0.05
"""Less likely drafts are not considered."""
_MIN_GAIN = 1.05
"""Expected tokens a second with drafts, relative to those without, above which a plan waits for results."""
_MIN_MEASURED_GAIN = 1.02
"""The same measured, below which more must be expected."""
_GAIN_DECAY = 31 / 32
_N_TRIED = 16
"""Steps that wait between two judgements of what they bring."""
_MARGIN_STEP = 1.1
_MAX_MARGIN = 2.0
_MARGIN_DECAY = 0.9997
"""By which the margin falls with each step that does not wait."""
_N_LOOKED_AT = 16
"""Rows that a step without drafts looks at."""
_LOOKS_A_STEP = 2
"""Rows that are looked at for each step on average, as long as that finds nothing."""
_N_PAUSED = 4
"""Steps that do not wait, after many that do; the first one does."""
_PAUSE_EVERY = 256


class _OpenGuess(NamedTuple):
    """A guess that is not yet compared with what came."""

    request: Request
    n_known: int
    """Bytes of the request's tokens that were known."""
    guess: Guess


class _Measured(NamedTuple):
    """A step that took ``seconds`` from the result before it."""

    n_rows: int
    n_drafts: int
    n_accepted: int
    seconds: float
    has_waited: bool
    is_tried: bool
    """Whether it waited for the sake of drafts."""
    has_prompts: bool
    device_seconds: float


class TextDrafts(Drafts):
    """Drafts what a source guesses.

    A step has the drafts with which the expected tokens a second are the most, by the chances of each kind of guess
    and the time of steps with so many rows. Both are learned from what comes, whether or not it was drafted.

    Where the device overlaps with the host, drafts cost that overlap: a plan with drafts waits for the results
    before it. So a step without drafts looks what the next one could have, and only an expected gain makes it wait.
    The device is idle longer if the next step computes prompts, whose launch takes long, and more must be expected
    then. Where less is gained than expected, more must be expected the next time.

    Args:
        source: guesses how the tokens of a request go on.
        n_tokens: most drafts of a row.
        overlaps: whether the device computes beside the host.
        clock: seconds, monotonic.
    """

    def __init__(
        self, source: Source, n_tokens: int, *, overlaps: bool, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._source = source
        self._max_drafts = n_tokens
        self._overlaps = overlaps
        self._clock = clock
        self._acceptance = Acceptance()
        self._costs = StepCosts(overlaps=overlaps)
        self._guesses: dict[int, _OpenGuess] = {}
        """By batch slot."""
        self._wants_results = not overlaps
        self._wants_beside_prompts = not overlaps
        """Whether the next plan is to wait even if it computes prompts."""
        self._search_pauses = SearchPauses()
        self._n_waited = 0
        """Steps that have waited, without a pause."""
        self._n_paused = 0
        self._n_unlooked = 0
        """Steps without drafts that come before another look."""
        self._margin = 1.0
        """Factor of the gain that must be expected."""
        self._n_looked_at, self._n_judged = 0, 0
        self._tried_s, self._without_s = 0.0, 0.0
        """Decayed times of steps that waited, and of steps without drafts for as many tokens."""
        self._ended_at, self._was_busy = 0.0, False
        self._measured: _Measured | None = None
        """The last step, until the one after it is known."""
        self._counts = DraftCounts(n_tokens)
        self._n_accepted_before = 0

    def wants_results(self, *, has_prompts: bool) -> bool:
        """Returns whether drafts of the next plan are expected to bring more than waiting costs."""
        return self._wants_beside_prompts if has_prompts else self._wants_results

    def draft(self, requests: Sequence[Request], max_drafts: Sequence[int], n_most: int) -> list[bytes]:
        """Returns what may follow the requests' tokens. Costs what the source does, and O(drafts log drafts)."""
        if self._n_paused or self._search_pauses.skips_step():
            return [b""] * len(requests)
        begun = self._clock()
        tokens: list[bytes] = []
        chances: list[list[float]] = []
        for request, max_of_row in zip(requests, max_drafts, strict=True):
            guess = self._guess(request) if max_of_row > 0 else None
            if guess is not None:
                self._counts.guessed(request, guess.source)
            tokens.append(b"" if guess is None else guess.tokens)
            chances.append([] if guess is None else self._chances(guess)[:max_of_row])
        # This step has waited. With drafts the next one must wait, too.
        counts, rate = self._choose(
            chances, len(requests), n_most, self._costs.more_seconds_after_drafts(len(requests))
        )
        if self._overlaps and rate < self._margin * self._rate_without(len(requests)):
            counts = [0] * len(requests)
        if not any(counts):
            if self._overlaps:
                self._look_ahead(chances, len(requests), n_most)
            else:
                step_s = self._costs.seconds(len(requests), waits=True)
                self._search_pauses.search_failed(self._clock() - begun, step_s)
        return [drafts[: n * TOKEN_BYTES] for drafts, n in zip(tokens, counts, strict=True)]

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Counts a row. O(1)."""
        self._counts.verified(request, n_drafts, n_accepted)

    def step_done(
        self,
        plan: StepPlan,
        requests: Sequence[Request],
        n_most: int,
        *,
        has_waited: bool,
        is_last: bool,
        device_seconds: float,
    ) -> None:
        """Measures the step; after one without drafts, looks what the next one could have.

        O(1), and what the source costs for ``_N_LOOKED_AT`` requests.
        """
        now = self._clock()
        seconds, self._ended_at = now - self._ended_at, now
        n_rows = len(plan.rows)
        n_accepted = self._counts.n_accepted - self._n_accepted_before
        self._n_accepted_before += n_accepted
        self._counts.step_done(has_waited=has_waited)
        is_decode = plan.n_decode == n_rows
        if self._measured is not None:
            # A step that does not wait is launched before the result of the step before it is taken. That result is
            # late then if the launch takes long, as it may with prompts.
            self._learn_costs(self._measured, is_late=not (is_decode or has_waited))
        # The first request is the oldest: if this token is its first, the device may have been idle before.
        is_busy = requests[0].n_outputs > 1
        self._measured = None
        if is_busy and self._was_busy:
            is_tried = has_waited and self._overlaps and not self._n_paused
            self._measured = _Measured(
                n_rows, plan.n_drafts, n_accepted, seconds, has_waited, is_tried, not is_decode, device_seconds
            )
        self._was_busy = is_busy
        self._costs.step_done(has_prompts=not is_decode, has_drafts=plan.n_drafts > 0)
        if not self._overlaps:
            return
        if self._n_paused:
            self._n_paused -= 1
        elif has_waited:
            self._n_waited += 1
        else:
            self._margin = max(1.0, self._margin * _MARGIN_DECAY)
            self._n_waited = 0
        if self._n_waited >= _PAUSE_EVERY:
            self._n_waited, self._n_paused = 0, _N_PAUSED
            self._wants_results = self._wants_beside_prompts = False
        elif is_last:  # the next plan will be asked for its drafts
            self._wants_results = self._wants_beside_prompts = False
        elif self._n_unlooked:
            self._n_unlooked -= 1
        elif not self._n_paused:
            self._look(requests[: plan.n_decode], n_most)
            if not self.wants_results(has_prompts=not is_decode):
                self._n_unlooked = min(plan.n_decode, _N_LOOKED_AT) // _LOOKS_A_STEP

    def ended(self, choices: Sequence[Request]) -> DraftUse:
        """Forgets a request; returns what became of its drafts. O(batch slots)."""
        for slot in [slot for slot, one in self._guesses.items() if one.request in choices]:
            del self._guesses[slot]
        return self._counts.ended(choices[0].id)

    def stats(self) -> DraftStats:
        """Returns the counters."""
        return self._counts.stats()

    def _guess(self, request: Request) -> Guess | None:
        """Makes a guess for a request, and compares an earlier one with what came. Costs what the source costs."""
        guess = self._source.guess(request, self._max_drafts)
        last = self._guesses.get(request.batch_slot)
        if last is None or last.request is not request or self._learn(last):
            if guess is None:
                self._guesses.pop(request.batch_slot, None)
            else:
                self._guesses[request.batch_slot] = _OpenGuess(request, len(request.known_key), guess)
        return guess

    def _learn(self, open_guess: _OpenGuess) -> bool:
        """Learns from a guess if it has gone wrong or all of its tokens have come; returns whether that is so."""
        request, n_known, guess = open_guess
        kind = guess.source, guess.n_matched
        came = request.known_key[n_known : n_known + len(guess.tokens)]
        if guess.tokens.startswith(came) and len(came) < len(guess.tokens):
            return False
        pairs = zip(memoryview(came).cast("i"), memoryview(guess.tokens).cast("i"), strict=False)
        n_right = next((index for index, (token, guessed) in enumerate(pairs) if token != guessed), None)
        n_compared = len(came) // TOKEN_BYTES
        if n_right is None:
            self._acceptance.learn(kind, n_compared, n_compared)
        else:
            self._acceptance.learn(kind, n_right, n_right + 1)
        return True

    def _chances(self, guess: Guess) -> list[float]:
        kind = guess.source, guess.n_matched
        chances = self._acceptance.chances(kind, len(guess.tokens) // TOKEN_BYTES, guess.prior)
        return [chance for chance in chances if chance >= _MIN_CHANCE]

    def _choose(
        self, chances: Sequence[Sequence[float]], n_rows: int, n_most: int, more_s: float
    ) -> tuple[list[int], float]:
        """Returns how many drafts of each row to check, and the expected tokens a second of the step.

        Args:
            chances: [rows] of those with guesses, each falling.
            n_rows: all rows of the step.
            n_most: most drafts.
            more_s: expected extra idle time of the device because of prompts.
        """
        order = sorted(((chance, row) for row, of_row in enumerate(chances) for chance in of_row), reverse=True)
        del order[n_most:]
        n_tokens = list(accumulate((chance for chance, _ in order), initial=float(n_rows)))
        best, best_rate, n_drafts = 0, n_rows / (more_s + self._costs.seconds(n_rows, waits=True)), 0
        while n_drafts < len(order):  # up to the most rows that cost the same
            n_drafts = min(bucket(n_rows + n_drafts + 1) - n_rows, len(order))
            rate = n_tokens[n_drafts] / (more_s + self._costs.seconds(n_rows + n_drafts, waits=True))
            if rate > best_rate:
                best, best_rate = n_drafts, rate
        counts = [0] * len(chances)
        for _, row in order[:best]:
            counts[row] += 1
        return counts, best_rate

    def _look(self, requests: Sequence[Request], n_most: int) -> None:
        """Looks what drafts some of the requests could have after the step that is launched already."""
        n_rows = len(requests)
        first = self._n_looked_at
        self._n_looked_at += _N_LOOKED_AT
        looked_at = [requests[(first + index) % n_rows] for index in range(min(n_rows, _N_LOOKED_AT))]
        guesses = [
            self._guess(request) if request.phase is Phase.RUNNING and request.max_drafts > 1 else None
            for request in looked_at
        ]
        chances = [[] if guess is None else self._chances(guess) for guess in guesses]
        n_copies = -(-n_rows // len(looked_at)) if looked_at else 0
        self._look_ahead(list(chain.from_iterable([chances] * n_copies))[:n_rows], n_rows, n_most)

    def _look_ahead(self, chances: Sequence[Sequence[float]], n_rows: int, n_most: int) -> None:
        """Decides whether the plan after the next one waits.

        Args:
            chances: [rows] of guesses whose first token the next step computes, so that drafts begin after it.
            n_rows: of the step.
            n_most: most drafts.
        """
        if n_most <= 0 or not self._costs.is_measured or not any(chances):
            self._wants_results = self._wants_beside_prompts = False
            return
        later = [of_row[1:] for of_row in chances]
        wanted = _MIN_GAIN * self._margin * self._rate_without(n_rows)
        more_s = self._costs.more_seconds_after_drafts(n_rows)
        self._wants_results = self._choose(later, n_rows, n_most, more_s)[1] > wanted
        more_s += self._costs.more_seconds(n_rows)
        self._wants_beside_prompts = self._wants_results and self._choose(later, n_rows, n_most, more_s)[1] > wanted

    def _rate_without(self, n_rows: int) -> float:
        """Returns the tokens a second of steps that do not wait."""
        return n_rows / self._costs.seconds(n_rows, waits=False)

    def _learn_costs(self, step: _Measured, *, is_late: bool) -> None:
        """Learns what a step has cost, and what it has brought if it waited.

        Args:
            step: any but the last one.
            is_late: whether its result may have been taken late.
        """
        n_rows, waits = step.n_rows, step.has_waited or not self._overlaps
        if waits and self._overlaps:
            idle_s = max(0.0, step.seconds - step.device_seconds)
            self._costs.record_idle(n_rows, idle_s, has_prompts=step.has_prompts, is_late=is_late)
        if step.has_prompts:
            return
        seconds = step.seconds
        if is_late and step.device_seconds:
            idle_s = self._costs.idle_seconds(n_rows, has_prompts=False) if waits else 0.0
            seconds = min(seconds, step.device_seconds + idle_s)
        seconds = self._costs.record(n_rows + step.n_drafts, seconds, waits=waits, is_late=is_late)
        if step.is_tried and not is_late:
            without_s = self._costs.seconds(n_rows, waits=False) * (n_rows + step.n_accepted) / n_rows
            self._judge(seconds, without_s)

    def _judge(self, seconds: float, without_s: float) -> None:
        """Changes the margin by what steps that waited have brought.

        Args:
            seconds: of a step that waited.
            without_s: of steps without drafts for as many tokens.
        """
        self._tried_s = self._tried_s * _GAIN_DECAY + seconds
        self._without_s = self._without_s * _GAIN_DECAY + without_s
        self._n_judged += 1
        if self._n_judged % _N_TRIED == 0:
            has_gained = self._without_s > _MIN_MEASURED_GAIN * self._tried_s
            factor = 1 / _MARGIN_STEP if has_gained else _MARGIN_STEP
            self._margin = min(_MAX_MARGIN, max(1.0, self._margin * factor))
