"""Requests with grammars: what is forced is drafted, what is forbidden is not, and answers stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.runtime.drafts.sources import ForcedText, Guess, LongestMatch, Source
from radixkv.runtime.drafts.text_drafts import TextDrafts
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.request import Request
from support.engine import token_bytes
from support.fake_device import expected_output, unpack
from support.fake_grammars import END, FakeGrammar
from support.loop_frontend import NAMESPACE, Frontend, done

MAX_DRAFTS = 4
FORCED = FakeGrammar(900, 14)
"""Allows one token after another."""
FREE = FakeGrammar(7, 14)


class WithoutGrammar(Source):
    """Guesses what would be sampled if the request had no grammar, which that mostly forbids."""

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        tokens = expected_output(NAMESPACE, unpack(bytes(request.known_key)), n_tokens)
        return Guess("answers", 3, token_bytes(tokens))


class OneToken(Source):
    """Guesses one token that the grammar allows, then one that it forbids."""

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        allowed = FREE.allowed(unpack(bytes(request.known_key))[request.n_prompt :])
        return Guess("answers", 3, token_bytes([min(allowed), 1]))


def open_drafts(source: Source) -> TextDrafts:
    return TextDrafts(ForcedText(LongestMatch((source,), (3, 8)), 8), MAX_DRAFTS, overlaps=False)


def answer(drafts: Drafts, grammar: FakeGrammar, **options: Any) -> tuple[Any, int]:
    """Returns what comes of three requests, and how many steps they take."""
    front = Frontend(drafts=drafts)
    for index in range(3):
        options = {"structured_outputs": grammar.specification, "max_tokens": 30, "logprobs": 1, **options}
        front.submit(f"{index}", range(1, 12 + 5 * index), seed=index, **options)
    for _ in range(200):
        if not front.loop.has_work:
            break
        if front.loop.is_waiting:
            front.grammars.finish(0)
        front.turn()
        for request in front.scheduler.running:
            assert request.constraint is not None
            assert request.constraint.output == unpack(bytes(request.known_key))[request.n_prompt :]  # type: ignore[attr-defined]
    found = [
        (one.tokens, sorted(one.logprobs, key=repr), one.finish_reasons)  # those of choices come in any order
        for one in front.received.values()
    ]
    return found, front.stats().steps_total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"n": 3},
        {"max_tokens": 6},
        {"stop_token_ids": [900], "min_tokens": 5},
        {"stop_token_ids": [900]},
    ],
)
def test_what_is_forced_takes_few_steps(options: dict[str, Any]) -> None:
    drafts = open_drafts(WithoutGrammar())
    (plain, n_plain), (drafted, n_steps) = answer(Drafts(), FORCED, **options), answer(drafts, FORCED, **options)
    assert drafted == plain
    stats = drafts.stats()
    assert stats.accepted_tokens_total == stats.draft_tokens_total, "what is forced is right"
    assert set(stats.by_source) <= {"grammar"}, "the other guesses are forbidden"
    if "stop_token_ids" not in options:
        assert n_steps < 0.7 * n_plain


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"max_tokens": 6}])
def test_forbidden_drafts_are_not_launched(options: dict[str, Any]) -> None:
    drafts = open_drafts(OneToken())
    (plain, n_plain), (drafted, n_steps) = answer(Drafts(), FREE, **options), answer(drafts, FREE, **options)
    assert drafted == plain
    stats = drafts.stats()
    assert 0 < stats.draft_tokens_total == stats.drafts_total, "one of each two"
    assert n_steps <= n_plain


def test_requests_beside_those_with_grammars_have_their_drafts() -> None:
    drafts = open_drafts(WithoutGrammar())
    front = Frontend(drafts=drafts)
    front.submit("a", temperature=0.0, max_tokens=20)
    front.submit("b", temperature=0.0, max_tokens=20, structured_outputs=FORCED.specification)
    front.run()
    assert {source: one.draft_tokens_total > 0 for source, one in drafts.stats().by_source.items()} == {
        "answers": True,
        "grammar": True,
    }
    assert front.received["b"].tokens[0][-1] == END
    plain = Frontend().serve("a", temperature=0.0, max_tokens=20)
    assert front.received["a"].tokens == plain.tokens


def test_an_abort_in_between_leaves_nothing_and_the_others_go_on() -> None:
    n_aborted = 0
    for n_turns in range(1, 12):
        drafts = open_drafts(WithoutGrammar())
        front = Frontend(drafts=drafts)
        for request_id in ("a", "b"):
            front.submit(request_id, n=2, structured_outputs=FORCED.specification, max_tokens=30)
        front.grammars.finish(0)
        front.turn(n_turns)
        front.cancel("a", 1)
        front.turn()
        front.cancel("a")
        front.run()
        n_aborted += done(front.received["a"]).finish_reason == "abort"
        assert [tokens[-1] for tokens in front.received["b"].tokens.values()] == [END, END]
        front.flush()
    assert 3 < n_aborted < 11, "some had ended before"
