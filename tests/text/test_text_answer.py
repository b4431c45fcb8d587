"""Decoding and stop strings together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_oracle import answer_text
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from radixkv.text.answer import AnswerText
from radixkv.text.tokenizer import Tokenizer


@settings(max_examples=150, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 5), max_size=20))
def test_answer_is_the_decoded_text_up_to_the_stop_string(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    whole = answer_text(tokenizer, ids)
    spans = st.tuples(st.integers(0, len(whole)), st.integers(1, 5))
    stop = [whole[at : at + length] for at, length in data.draw(st.lists(spans, max_size=3))]
    stop = [word for word in stop if word]
    ends = [whole.find(word) + len(word) for word in stop]
    starts = [whole.find(word) for word in stop if whole.find(word) + len(word) == min(ends)]

    answer = AnswerText(tokenizer, stop)
    shown = ""
    for cut in [*cuts, *[1] * len(ids)]:
        piece, met = answer.push(ids[:cut])
        ids = ids[cut:]
        shown += piece
        if met:
            break
    rest, met = answer.finish()
    assert (shown + rest, met) == ((whole[: min(starts)], True) if stop else (whole, False))
    assert (answer.stop_string is not None) == met
    assert answer.stop_string is None or whole.startswith(shown + rest + answer.stop_string)


def test_stop_string_that_only_the_last_flush_completes(tokenizer: Tokenizer) -> None:
    answer = AnswerText(tokenizer, [answer_text(tokenizer, range(tokenizer.vocab_size))])
    pieces = [answer.push([token])[0] for token in range(tokenizer.vocab_size)]
    rest, met = answer.finish()
    assert "".join(pieces) + rest == ""
    assert met


@pytest.mark.parametrize("before", ["", "x", "日", "\n"])
def test_a_newline_that_is_a_single_byte_token_stops_at_once(before: str) -> None:
    """As Llama 2 and Mistral write it."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    answer = AnswerText(Tokenizer(backend), ["." + before + "\n"])
    assert answer.push([256]) == ("x", False)
    assert answer.push(list(f".{before}".encode())) == ("", False)
    assert answer.push([0x0A]) == ("", True)
    assert answer.finish() == ("", True)


def test_a_stop_string_that_only_the_end_completes_is_met() -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    answer = AnswerText(Tokenizer(backend), ["\ufffd"])
    assert answer.push([0x61, 0xE6]) == ("a", False)
    assert answer.finish() == ("", True)
