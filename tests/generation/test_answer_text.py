"""Tests of incremental detokenisation together with stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from radixkv.generation.answer_text import AnswerText
from radixkv.text.tokenizer import Tokenizer
from support.cases import examples
from support.small_tokenizers import single_bytes
from support.text_oracle import expected_text


@examples(150)
@given(data=st.data(), cuts=st.lists(st.integers(0, 5), max_size=20), includes=st.booleans())
def test_answer_is_the_decoded_text_up_to_the_stop_string(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], includes: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    full_text = expected_text(tokenizer, ids)
    spans = st.tuples(st.integers(0, len(full_text)), st.integers(1, 5))
    stop = [full_text[at : at + length] for at, length in data.draw(st.lists(spans, max_size=3))]
    stop = [word for word in stop if word]
    ends = [full_text.find(word) + len(word) for word in stop]
    starts = [full_text.find(word) for word in stop if full_text.find(word) + len(word) == min(ends)]

    answer = AnswerText(tokenizer, stop, includes_stop=includes)
    shown = ""
    for cut in [*cuts, *[1] * len(ids)]:
        piece, has_matched = answer.push(ids[:cut])
        ids = ids[cut:]
        shown += piece
        if has_matched:
            break
    rest, has_matched = answer.finish()
    cut = min(ends if includes else starts, default=None)
    assert (shown + rest, has_matched) == (full_text[:cut], bool(stop))
    assert (answer.stop_string is not None) == has_matched
    assert answer.stop_string is None or full_text[: min(ends)].endswith(answer.stop_string)


@examples(150)
@given(data=st.data(), is_stopped=st.booleans(), includes=st.booleans(), skips=st.booleans())
def test_decode_all_equals_the_concatenated_pieces(
    tokenizer: Tokenizer, data: st.DataObject, is_stopped: bool, includes: bool, skips: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    singly, at_once = (AnswerText(tokenizer, includes_stop=includes, skip_special_tokens=skips) for _ in range(2))
    last = len(ids) - 1
    pieces = [singly.push([token], is_stopped=is_stopped and i == last)[0] for i, token in enumerate(ids)]
    rest, _ = singly.finish()
    assert at_once.decode_all(ids, is_stopped=is_stopped) == "".join(pieces) + rest
    assert at_once.finish() == ("", False)
    assert at_once.n_characters == singly.n_characters


def test_a_stop_string_that_spans_the_whole_text_matches_at_the_end(tokenizer: Tokenizer) -> None:
    answer = AnswerText(tokenizer, [expected_text(tokenizer, range(tokenizer.vocab_size))])
    pieces = [answer.push([token])[0] for token in range(tokenizer.vocab_size)]
    rest, has_matched = answer.finish()
    assert "".join(pieces) + rest == ""
    assert has_matched


@pytest.mark.parametrize("before", ["", "x", "日", "\n"])
def test_a_newline_that_is_a_single_byte_token_stops_at_once(before: str) -> None:
    """Llama 2 and Mistral encode newlines so."""
    answer = AnswerText(Tokenizer(single_bytes()), ["." + before + "\n"])
    assert answer.push([256]) == ("x", False)
    assert answer.push(list(f".{before}".encode())) == ("", False)
    assert answer.push([0x0A]) == ("", True)
    assert answer.finish() == ("", True)


def test_a_stop_string_that_only_finish_completes_matches() -> None:
    answer = AnswerText(Tokenizer(single_bytes()), ["\ufffd"])
    assert answer.push([0x61, 0xE6]) == ("a", False)
    assert answer.finish() == ("", True)


LETTERS = Backend(models.WordLevel({letter: index for index, letter in enumerate("abc")} | {"</s>": 3}, "a"))
LETTERS.decoder = decoders.Fuse()
LETTERS.add_special_tokens(["</s>"])


def letters(**settings: Any) -> AnswerText:
    """Returns an answer with a tokenizer whose tokens 0, 1, 2 are a, b, c, and 3 is special."""
    return AnswerText(Tokenizer(LETTERS), **settings)


def vllm_end_index(text: str, stop: list[str], min_tokens: int) -> int | None:
    """Returns where vLLM stops an answer of one character per token: matches end after the first ``min_tokens``."""
    for n_tokens in range(min_tokens + 1, len(text) + 1):
        if text[:n_tokens].endswith(tuple(stop)):
            return n_tokens
    return None


@examples(300)
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
    end = vllm_end_index(text, stop, min_tokens)
    answer = letters(stop=stop, min_tokens=min_tokens, includes_stop=True)
    shown = ""
    for cut in [*cuts, *[1] * len(ids)]:
        piece, has_matched = answer.push(ids[:cut])
        ids = ids[cut:]
        shown += piece
        assert not has_matched or end is not None
    rest, has_matched = answer.finish()
    assert (shown + rest, has_matched) == (text[:end], end is not None)


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
    piece, has_matched = answer.push([0, 3], is_stopped=True)
    assert not has_matched
    assert piece + answer.finish()[0] == text
    plain = letters(**settings)
    assert plain.push([0, 1], is_stopped=True)[0] == ("ab" if "includes_stop" in settings else "a")
