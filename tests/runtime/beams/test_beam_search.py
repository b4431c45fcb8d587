"""The policy of beam search beside a naive one, over models of a few tokens."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.beams.search import BeamSearch
from radixkv.tree.node import Namespace
from radixkv.wire.messages import TokenLogprobs, pack_tokens, unpack_tokens
from support.cases import examples
from support.fake_device import ExpectedBeam, chain, expected_beams

PROMPT = [3, 1, 4]


class Model:
    """Gives each token a logprob that depends on all tokens before.

    Args:
        n_tokens: size of the vocabulary.
        resolution: of the logprobs; with a low one many are equal.
        end_bonus: added to the logprob of the tokens 0 and 1.
    """

    def __init__(self, n_tokens: int, resolution: int, end_bonus: float) -> None:
        self.n_tokens = n_tokens
        self._resolution = resolution
        self._end_bonus = end_bonus

    def logprobs_after(self, end: int) -> Mapping[int, float]:
        logprobs = {
            token: -(hash((end, token)) % self._resolution + 1) * 8 / self._resolution
            + (self._end_bonus if token < 2 else 0.0)
            for token in range(self.n_tokens)
        }
        return dict(sorted(logprobs.items(), key=lambda item: -item[1]))

    def likeliest(self, tokens: list[int], n_tokens: int) -> TokenLogprobs:
        top = list(self.logprobs_after(chain(Namespace(), [*PROMPT, *tokens])).items())[:n_tokens]
        ids, logprobs = zip(*top, strict=True)
        return TokenLogprobs(logprobs[0], 1, pack_tokens(ids), struct.pack(f"<{len(top)}f", *logprobs))


def found_beams(
    model: Model, width: int, max_tokens: int, stop: frozenset[int], length_penalty: float
) -> list[ExpectedBeam]:
    """Returns what the policy finds, keeping the tokens of its beams beside it."""
    search = BeamSearch(width, max_tokens, length_penalty=length_penalty, eos_token_ids=stop)
    beams: list[list[int]] = [[]]
    while not search.is_ended:
        chosen = search.advance([model.likeliest(tokens, search.n_candidates) for tokens in beams])
        assert len(chosen) == (0 if search.is_ended else width)
        beams = [[*beams[parent], token] for parent, token in chosen]
    return [
        ExpectedBeam(beam.score, unpack_tokens(beam.tokens), beam.logprob, beam.finish_reason)
        for beam in search.finished
    ]


@examples(300)
@given(
    width=st.integers(1, 6),
    n_more_tokens=st.integers(0, 6),
    n_stop=st.integers(0, 2),
    max_tokens=st.integers(1, 8),
    length_penalty=st.sampled_from((1.0, 0.0, 0.5, 2.0, -1.0)),
    end_bonus=st.sampled_from((-4.0, 0.0, 0.0, 4.0)),
    resolution=st.sampled_from((1 << 14, 1 << 14, 1 << 3)),
)
def test_it_finds_the_beams_of_a_naive_search(
    width: int,
    n_more_tokens: int,
    n_stop: int,
    max_tokens: int,
    length_penalty: float,
    end_bonus: float,
    resolution: int,
) -> None:
    stop = frozenset(range(n_stop))
    model = Model(width + n_stop + n_more_tokens, resolution, end_bonus)
    expected = expected_beams(
        Namespace(), PROMPT, width, max_tokens, sorted(stop), length_penalty, model.logprobs_after
    )
    found = found_beams(model, width, max_tokens, stop, length_penalty)
    assert len(found) == width
    assert [beam.logprob for beam in found] == [beam.logprob for beam in expected]
    assert found == expected


def test_an_end_that_is_not_among_the_best_is_not_an_answer() -> None:
    search = BeamSearch(2, 8, eos_token_ids=frozenset({9}))
    ids, logprobs = pack_tokens([5, 6, 9]), struct.pack("<3f", -1.0, -2.0, -3.0)
    assert search.advance([TokenLogprobs(-1.0, 1, ids, logprobs)]) == [(0, 5), (0, 6)]
    assert search.finished == []


def test_the_search_ends_when_no_beam_can_be_an_answer() -> None:
    search = BeamSearch(1, 8, eos_token_ids=frozenset({9}))
    ids, logprobs = pack_tokens([9, 5]), struct.pack("<2f", -1.0, -2.0)
    assert search.advance([TokenLogprobs(-1.0, 1, ids, logprobs)]) == []
    assert search.is_ended
    assert [(beam.score, unpack_tokens(beam.tokens), beam.finish_reason) for beam in search.finished] == [
        (-1.0, [9], "stop")
    ]
