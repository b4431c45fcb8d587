"""The output of a choice is the same however its tokens arrive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.generation.models import GenerationModel
from radixkv.generation.output import ChoiceStream, OutputDelta
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Ready, TokenLogprobs, pack_tokens
from radixkv.wire.sampling import SamplingParams
from support.text_oracle import expected_text

READY = Ready(6, 400, 1000, 16, 100, 8, 512, "cpu", "float32")
EOS = 3


def model(tokenizer: Tokenizer | None) -> GenerationModel:
    return GenerationModel(ready=READY, tokenizer=tokenizer, eos_token_ids=frozenset({EOS}))


def logprobs(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(token), 1, b"", b"") for token in ids]


def render(
    tokenizer: Tokenizer | None, token: int, offset: int, token_logprobs: TokenLogprobs | None, n_top: int
) -> tuple[int, float, int]:
    assert token_logprobs is not None
    return token, token_logprobs.logprob, offset


def absorb(stream: ChoiceStream[Any], groups: list[list[int]], **end: Any) -> OutputDelta[Any]:
    """Returns the whole output of tokens that arrive in groups; the last group has the end."""
    output: OutputDelta[Any] = OutputDelta()
    for number, ids in enumerate(groups, start=1):
        output.add(stream.absorb(pack_tokens(ids), logprobs(ids), **(end if number == len(groups) else {})))
    return output


@pytest.mark.parametrize("first_offset", [None, 7])
@given(data=st.data(), has_stop=st.booleans())
def test_the_output_does_not_depend_on_how_tokens_are_grouped(
    tokenizer: Tokenizer, first_offset: int | None, data: st.DataObject, has_stop: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=40))
    text = expected_text(tokenizer, ids)
    start = data.draw(st.integers(0, max(0, len(text) - 3)))
    stop = (text[start : start + 3],) if has_stop and text else ()
    sampling = SamplingParams(stop=stop, max_tokens=40)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {len(ids)})
    groups = [ids[begin:end] for begin, end in zip([0, *cuts], cuts, strict=False)]
    found, singly, together = (
        absorb(ChoiceStream(sampling, model(tokenizer), render, first_offset), way, finish_reason="length")
        for way in (groups, [[token] for token in ids], [ids])
    )
    assert found == singly == together
    assert [token for token, _, _ in found.logprobs] == found.token_ids == ids[: len(found.token_ids)]
    assert [logprob for _, logprob, _ in found.logprobs] == [-float(token) for token in found.token_ids]
    assert len(found.parts) <= 1
    if not stop:
        assert (found.text, found.finish_reason) == (text, "length")
    else:
        assert (found.text, found.stop_reason) == (text[: text.index(stop[0])], stop[0])
    if first_offset is not None:
        shown = [offset for _, _, offset in found.logprobs]
        assert shown == sorted(shown)
        assert shown[0] == first_offset


def test_offsets_are_the_characters_before_each_token(tokenizer: Tokenizer) -> None:
    ids = list(range(min(tokenizer.vocab_size, 60)))
    sampling = SamplingParams(skip_special_tokens=False, max_tokens=60)
    output = absorb(ChoiceStream(sampling, model(tokenizer), render, 5), [ids], finish_reason="length")
    plain = ChoiceStream(sampling, model(tokenizer))
    expected = [5]
    for token in ids[:-1]:
        expected.append(expected[-1] + len(plain.absorb(pack_tokens([token])).text))
    assert [offset for _, _, offset in output.logprobs] == expected


@pytest.mark.parametrize(
    ("settings", "token", "stop_reason"),
    [
        ({}, EOS, None),
        ({"stop_token_ids": (9,)}, 9, 9),
        ({"stop_token_ids": (9, EOS)}, EOS, None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, EOS),
    ],
    ids=str,
)
def test_a_stop_token_is_the_reason_unless_it_ends_every_answer(
    settings: dict[str, Any], token: int, stop_reason: int | None
) -> None:
    stream = ChoiceStream(SamplingParams(**settings), model(None))
    output = absorb(stream, [[5], [token]], finish_reason="stop", stop_token_id=token)
    assert (output.token_ids, output.text) == ([5, token], "")
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_reason)
    assert stream.n_tokens == 2
    assert stream.absorb(pack_tokens([6])).is_empty
