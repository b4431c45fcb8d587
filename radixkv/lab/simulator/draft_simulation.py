"""What drafts would bring on a recording: the steps that its answers take, by source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import msgspec

from radixkv.lab.bench.formatting import format_tokens, plural
from radixkv.lab.simulator.draft_replay import DraftReplay, Exchange, Place, n_right
from radixkv.lab.simulator.recording import Recording
from radixkv.runtime.drafts.sources import LongestMatch, Source
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.terminal import Progress, Table
from radixkv.tree.node import TOKEN_BYTES

ALL = "all"
"""The name of what the engine drafts: of the sources' guesses the one with the longest match."""


class DraftResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one source alone, or all, would bring: a row of the table and a JSON line."""

    trace: str
    tokenizer: str | None
    """Name of the tokenizer that encoded the recording; None if it has no texts."""
    method: str
    num_speculative_tokens: int
    concurrency: int
    """Most answers in flight."""
    source: str
    """``tree``, ``prediction``, ``prompt`` or ``answers`` as in ``/metrics``, or ``all``."""
    n_requests: int
    n_answers: int
    """Requests whose answers are known."""
    n_answer_tokens: int
    """Tokens after the first one of each answer, which take as many steps without drafts."""
    n_steps: int
    """Steps that these take with drafts."""
    tokens_a_step: float | None
    """None if no answer has a second token."""
    n_draft_tokens: int
    n_accepted_tokens: int
    seconds: float
    """Wall-clock time of the replay of all sources."""


@dataclass(slots=True)
class _Steps:
    """The steps of all answers with the drafts of one source."""

    source: Source
    next_rounds: list[int]
    """The round in which each client's next step is. No step goes on behind an answer, whose last token is sampled,
    so the next answer's first round has a step."""
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def count(self, number: int, places: Sequence[Place | None], max_drafts: int) -> None:
        """Counts the steps of a round."""
        for client, place in enumerate(places):
            if place is not None and self.next_rounds[client] == number:
                guess = self.source.guess(place.request, max_drafts)
                tokens = b"" if guess is None else guess.tokens
                n_accepted = n_right(tokens, place.following)
                self.n_steps += 1
                self.n_drafted += len(tokens) // TOKEN_BYTES
                self.n_accepted += n_accepted
                self.next_rounds[client] = number + 1 + n_accepted


def simulate_drafts(recording: Recording, config: SpeculativeConfig, *, concurrency: int = 1) -> list[DraftResult]:
    """Returns what each source would bring alone, and if there are several, what all together would, which is last.

    Each step checks all that is guessed for it. Shows its progress on standard error. Some 50 µs for a token of an
    answer, and O(tokens of its prompt) for many of them.

    Args:
        recording: has answers.
        config: the sources, and lengths of drafts and of matches.
        concurrency: most answers in flight, of a chat one at a time.
    """
    started = perf_counter()
    traffic, answers = recording.traffic, recording.answers
    n_answers = sum(map(bool, answers))
    n_pages = traffic.n_distinct_pages + sum(len(one) // TOKEN_BYTES // traffic.page_size + 2 for one in answers)
    replay = DraftReplay(config, n_pages, traffic.page_size)
    sources = dict(replay.sources)
    if not any(recording.predictions):
        del sources["prediction"]
    if len(sources) > 1:
        sources[ALL] = LongestMatch(tuple(sources.values()), config.lookup_sizes)
    n_clients = min(concurrency, len(answers))  # more stay idle
    steps = {name: _Steps(source, [0] * n_clients) for name, source in sources.items()}
    exchanges = [
        Exchange(traffic.symbols(index), answer, prediction)
        for index, (answer, prediction) in enumerate(zip(answers, recording.predictions, strict=True))
    ]
    n_tokens = sum(max(len(answer) // TOKEN_BYTES - 1, 0) for answer in answers)
    n_replayed = 0
    with Progress(f"replaying the answers of {recording.name}", enabled=True) as progress:
        for number, places in enumerate(replay.rounds(exchanges, n_clients)):
            progress.show(f"{n_replayed:,}/{n_tokens:,} tokens")
            n_replayed += n_clients - places.count(None)
            for one in steps.values():
                one.count(number, places, config.num_speculative_tokens)
    return [
        DraftResult(
            trace=recording.name,
            tokenizer=recording.tokenizer,
            method=config.method,
            num_speculative_tokens=config.num_speculative_tokens,
            concurrency=concurrency,
            source=name,
            n_requests=len(answers),
            n_answers=n_answers,
            n_answer_tokens=n_tokens,
            n_steps=one.n_steps,
            tokens_a_step=round(n_tokens / one.n_steps, 3) if one.n_steps else None,
            n_draft_tokens=one.n_drafted,
            n_accepted_tokens=one.n_accepted,
            seconds=round(perf_counter() - started, 3),
        )
        for name, one in steps.items()
    ]


def draft_table(results: Sequence[DraftResult]) -> str:
    """Returns the table of a recording's results."""
    titles = ("source", "tokens a step", "steps", "steps saved", "drafted tokens", "accepted tokens", "accepted")
    table = Table(titles, (8, 6, 6, 6, 6, 6, 6))
    return table.text(
        [
            (
                one.source,
                "n/a" if one.tokens_a_step is None else f"{one.tokens_a_step:.2f}",
                format_tokens(one.n_steps),
                _percent(one.n_answer_tokens - one.n_steps, one.n_answer_tokens),
                format_tokens(one.n_draft_tokens),
                format_tokens(one.n_accepted_tokens),
                _percent(one.n_accepted_tokens, one.n_draft_tokens),
            )
            for one in results
        ]
    )


def draft_title(results: Sequence[DraftResult]) -> str:
    """Returns a line that says what was replayed."""
    one = results[-1]
    drafts = plural(one.num_speculative_tokens, "token")
    order = "one answer after another" if one.concurrency == 1 else f"up to {one.concurrency} answers in flight"
    return (
        f"drafts of at most {drafts}, method {one.method}: {plural(one.n_answers, 'answer')} with "
        f"{plural(one.n_answer_tokens, 'token')} after the first, {order}"
    )


def draft_remarks(results: Sequence[DraftResult]) -> list[str]:
    """Returns the remarks below the table."""
    one = results[-1]
    remarks = [
        "a step here checks every draft of one answer. The time that drafts gain depends on the batch size and is "
        "not simulated: a server checks only those that it expects to gain some"
    ]
    if one.n_answers < one.n_requests:
        remarks.append(f"{plural(one.n_requests - one.n_answers, 'request')} without a known answer in the file")
    return remarks


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "n/a"
