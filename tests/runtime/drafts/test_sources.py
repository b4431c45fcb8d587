"""Sources of drafts: cached sequences, and the choice among several sources."""

from __future__ import annotations

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.drafts.acceptance import Acceptance
from radixkv.runtime.drafts.open import open_sources
from radixkv.runtime.drafts.sources import CachedSequences, ForcedText, Guess, LongestMatch, OwnText, Source
from radixkv.runtime.request import Request
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.tree.node import Namespace
from radixkv.wire.messages import unpack_tokens
from support.engine import token_bytes
from support.fake_grammars import END, FakeGrammar
from support.trees import ids, insert


class Fixed(Source):
    """Has one guess, and counts how often it is asked."""

    def __init__(self, n_matched: int | None, *tokens: int) -> None:
        self.found = None if n_matched is None else Guess(f"of {n_matched}", n_matched, ids(*tokens or (1,)))
        self.n_asked = 0

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        self.n_asked += 1
        return self.found


def request(text: list[int], **fields: object) -> Request:
    return Request("a", Namespace(), bytearray(token_bytes(text)), 1, 99, **fields)  # type: ignore[arg-type]


def test_the_longest_match_wins_and_then_the_first_source() -> None:
    for lengths, winner in [((None, 3, 5), 2), ((5, 3), 0), ((3, 3), 0), ((None, None), None)]:
        sources = [Fixed(length) for length in lengths]
        found = LongestMatch(sources, (2, 8, 9)).guess(request([1]), 1)
        assert found is (None if winner is None else sources[winner].found)


def test_no_source_is_asked_after_a_match_that_is_long_enough() -> None:
    sources = [Fixed(3), Fixed(8), Fixed(9)]
    LongestMatch(sources, (2, 8, 9)).guess(request([1]), 1)
    assert [source.n_asked for source in sources] == [1, 1, 0]


def test_a_cached_sequence_that_begins_with_all_tokens_goes_on() -> None:
    cache = PageCache(8, 2)
    cache.tree.release(insert(cache.tree, ids(1, 2, 3, 4, 5, 6), range(3)))
    source = CachedSequences(cache.tree, 8)
    reading = request([1, 2, 3], block_table=cache.open(Namespace(), ids(1, 2)))
    assert source.guess(reading, 2) == Guess("tree", 8, ids(4, 5))
    assert source.guess(request([1, 2, 4], block_table=reading.block_table), 2) is None
    apart = cache.open(Namespace(), ids(1, 2), bypasses_tree=True)
    assert source.guess(request([1, 2, 3], block_table=apart), 2) is None


def test_own_text_goes_on_as_before() -> None:
    assert OwnText((2,)).guess(request([1, 2, 3, 4, 1, 2]), 2) == Guess("prompt", 2, ids(3, 4))
    assert OwnText((2,)).guess(request([1, 2, 3, 4]), 2) is None


def test_a_guess_ends_before_the_first_token_that_the_constraint_forbids() -> None:
    matcher = FakeGrammar(3, 9).new_matcher()  # tokens of which each is, modulo 3, the sum of all before
    obeying = request([1], constraint=matcher)
    long, short = Fixed(5, 300, 303, 304, 306), Fixed(3, 300)
    assert LongestMatch((long, short), (2, 8)).guess(obeying, 4) == Guess("of 5", 5, ids(300, 303))
    assert matcher.output == []
    assert LongestMatch((long, short), (2, 8)).guess(request([1]), 4) is long.found


def test_a_guess_that_is_forbidden_at_once_leaves_the_place_to_others() -> None:
    obeying = request([1], constraint=FakeGrammar(3, 9).new_matcher())
    for forbidden in (Fixed(8, 301), Fixed(5, 301)):
        shortest, short = Fixed(2, 300, 303), Fixed(3, 300)
        for sources in ((forbidden, shortest, short), (shortest, short, forbidden)):
            assert LongestMatch(sources, (2, 8)).guess(obeying, 4) == short.found
        assert LongestMatch((forbidden,), (2, 8)).guess(obeying, 4) is None


def test_a_guess_ends_before_the_token_that_ends_the_output() -> None:
    grammar = FakeGrammar(3, 2)
    matcher = grammar.new_matcher()
    guess = LongestMatch((Fixed(5, 300, 303, END, 5),), (2, 8)).guess(request([1], constraint=matcher), 4)
    assert guess == Guess("of 5", 5, ids(300, 303))


def test_a_guess_ends_before_the_first_token_that_stops_the_request() -> None:
    stopping = request([1], stop_token_ids=frozenset({END, 9}))
    found = LongestMatch((Fixed(8, 5, END, 7, 9), Fixed(3, 6)), (2, 8)).guess(stopping, 4)
    assert found == Guess("of 8", 8, ids(5))
    short = Fixed(3, 6)
    assert LongestMatch((Fixed(8, 9, 5), short), (2, 8)).guess(stopping, 4) is short.found
    assert LongestMatch((Fixed(8, 9, 5),), (2, 8)).guess(stopping, 4) is None
    whole = Fixed(8, END << 8, 5)
    assert LongestMatch((whole,), (2, 8)).guess(stopping, 4) is whole.found


FORCED = FakeGrammar(900, 9)  # allows one token after another


def test_a_forced_text_is_guessed_unless_another_guess_has_more_tokens() -> None:
    forced = FORCED.new_matcher().forced(3)
    assert len(unpack_tokens(forced)) == 3
    obeying = request([1], constraint=FORCED.new_matcher())
    for found, is_kept in [((), False), ((1,), False), ((1, 2, 3), False), ((1, 2, 3, 4), True)]:
        other = Fixed(2, *found) if found else Fixed(None)
        guess = ForcedText(other, 8).guess(obeying, 3)
        assert guess is not None
        assert guess is other.found if is_kept else guess[:3] == ("grammar", 8, forced)
    assert len(ForcedText(Fixed(None), 8).guess(obeying, 2).tokens) == 8  # type: ignore[union-attr]


def test_a_forced_text_ends_before_the_first_token_that_stops_the_request() -> None:
    forced = FORCED.new_matcher().forced(3)
    for stop, left in [(unpack_tokens(forced)[0], None), (1, forced)]:
        obeying = request([1], constraint=FORCED.new_matcher(), stop_token_ids=frozenset({stop}))
        guess = ForcedText(Fixed(None), 8).guess(obeying, 3)
        assert (guess and guess.tokens) == left


def test_what_is_forced_is_likely_right_before_any_was_compared() -> None:
    obeying = request([1], constraint=FORCED.new_matcher())
    guess = ForcedText(Fixed(None), 8).guess(obeying, 3)
    assert guess is not None
    assert Acceptance().chances("grammar", 2, guess.prior) == [0.98, 0.98 * 0.95]


def test_sources_are_asked_in_the_order_that_was_measured() -> None:
    """The first of equally long matches is taken."""
    for method, names in [
        ("ngram", ["prediction", "prompt"]),
        ("tree", ["tree", "prediction", "answers", "prompt"]),
    ]:
        sources, _ = open_sources(SpeculativeConfig(method=method), PageCache(8, 2), 1000)
        assert list(sources) == names


def test_without_a_forced_text_another_guess_is_kept() -> None:
    other = Fixed(2, 300)
    assert ForcedText(other, 8).guess(request([1], constraint=FakeGrammar(3, 9).new_matcher()), 3) is other.found
    assert ForcedText(other, 8).guess(request([1]), 3) is other.found
    assert ForcedText(Fixed(None), 8).guess(request([1]), 3) is None
