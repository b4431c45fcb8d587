"""Decoding and stop strings together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from radixkv.text.answer_text import AnswerText
from radixkv.text.tokenizer import Tokenizer
from support.text_oracle import answer_text


@settings(max_examples=150, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 5), max_size=20), includes=st.booleans())
def test_answer_is_the_decoded_text_up_to_the_stop_string(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], includes: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    whole = answer_text(tokenizer, ids)
    spans = st.tuples(st.integers(0, len(whole)), st.integers(1, 5))
    stop = [whole[at : at + length] for at, length in data.draw(st.lists(spans, max_size=3))]
    stop = [word for word in stop if word]
    ends = [whole.find(word) + len(word) for word in stop]
    starts = [whole.find(word) for word in stop if whole.find(word) + len(word) == min(ends)]

    answer = AnswerText(tokenizer, stop, includes_stop=includes)
    shown = ""
    for cut in [*cuts, *[1] * len(ids)]:
        piece, met = answer.push(ids[:cut])
        ids = ids[cut:]
        shown += piece
        if met:
            break
    rest, met = answer.finish()
    cut = min(ends if includes else starts, default=None)
    assert (shown + rest, met) == (whole[:cut], bool(stop))
    assert (answer.stop_string is not None) == met
    assert answer.stop_string is None or whole[: min(ends)].endswith(answer.stop_string)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), is_stopped=st.booleans(), includes=st.booleans(), skips=st.booleans())
def test_a_whole_answer_is_what_its_pieces_are(
    tokenizer: Tokenizer, data: st.DataObject, is_stopped: bool, includes: bool, skips: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    singly, whole = (AnswerText(tokenizer, includes_stop=includes, skip_special_tokens=skips) for _ in range(2))
    last = len(ids) - 1
    pieces = [singly.push([token], is_stopped=is_stopped and i == last)[0] for i, token in enumerate(ids)]
    rest, _ = singly.finish()
    assert whole.whole(ids, is_stopped=is_stopped) == "".join(pieces) + rest
    assert whole.finish() == ("", False)
    assert whole.n_characters == singly.n_characters


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


LETTERS = Backend(models.WordLevel({letter: place for place, letter in enumerate("abc")} | {"</s>": 3}, "a"))
LETTERS.decoder = decoders.Fuse()
LETTERS.add_special_tokens(["</s>"])


def letters(**settings: Any) -> AnswerText:
    """Answers whose tokens 0, 1, 2 are a, b, c, and 3 is special."""
    return AnswerText(Tokenizer(LETTERS), **settings)


def vllm_end(text: str, stop: list[str], min_tokens: int) -> int | None:
    """Where vLLM stops an answer of one character a token: a match must end behind the first ``min_tokens``."""
    for n_tokens in range(min_tokens + 1, len(text) + 1):
        if text[:n_tokens].endswith(tuple(stop)):
            return n_tokens
    return None


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2), max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 7), max_size=6),
)
def test_stop_strings_count_only_from_min_tokens_on(
    ids: list[int], stop: list[str], min_tokens: int, cuts: list[int]
) -> None:
    text = "".join("abc"[token] for token in ids)
    end = vllm_end(text, stop, min_tokens)
    answer = letters(stop=stop, min_tokens=min_tokens, includes_stop=True)
    shown = ""
    for cut in [*cuts, *[1] * len(ids)]:
        piece, met = answer.push(ids[:cut])
        ids = ids[cut:]
        shown += piece
        assert not met or end is not None
    rest, met = answer.finish()
    assert (shown + rest, met) == (text[:end], end is not None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "a"),
        ({"includes_stop": True}, "a"),
        ({"skip_special_tokens": False}, "a"),
        ({"includes_stop": True, "skip_special_tokens": False}, "a</s>"),
    ],
)
def test_the_token_that_ends_an_answer(settings: dict[str, bool], text: str) -> None:
    answer = letters(**settings)
    piece, met = answer.push([0, 3], is_stopped=True)
    assert not met
    assert piece + answer.finish()[0] == text
    plain = letters(**settings)
    assert plain.push([0, 1], is_stopped=True)[0] == ("ab" if "includes_stop" in settings else "a")
