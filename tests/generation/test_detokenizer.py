"""Tests of incremental detokenisation: pieces are whole characters and concatenate to the decoded text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from radixkv.generation.detokenizer import IncrementalDetokenizer
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import pack_tokens
from support.cases import examples
from support.small_tokenizers import single_bytes
from support.text_oracle import expected_text

MANY = examples(150)

CUTS = st.lists(st.integers(0, 5), max_size=80)
"""How many ids each push has; the remaining ids are pushed one by one."""


def ids_strategy(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Generates ids in and beyond the vocabulary, with runs of one id, which leave characters incomplete."""
    run = st.tuples(st.integers(0, tokenizer.vocab_size + 3), st.sampled_from([1, 1, 1, 2, 40]))
    return st.lists(run, max_size=40).map(lambda runs: [token for token, length in runs for _ in range(length)])


def push_in_pieces(detokenizer: IncrementalDetokenizer, ids: Sequence[int], cuts: list[int]) -> list[str]:
    pieces = []
    rest = list(ids)
    for cut in cuts:
        pieces.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    pieces += [detokenizer.push([token]) for token in rest]
    return pieces


@MANY
@given(data=st.data(), cuts=CUTS, skips=st.booleans())
def test_pieces_concatenate_to_the_text_of_all_ids(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skips: bool
) -> None:
    ids = data.draw(ids_strategy(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips)
    text = "".join(push_in_pieces(detokenizer, ids, cuts)) + detokenizer.finish()
    assert text == expected_text(tokenizer, ids, skip_special_tokens=skips)
    assert detokenizer.n_characters == len(text)


@MANY
@given(data=st.data(), cuts=CUTS, skips=st.booleans(), repeats=st.booleans(), at_once=st.booleans())
def test_an_answer_is_what_it_adds_to_the_text_of_its_prompt(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skips: bool, repeats: bool, at_once: bool
) -> None:
    prompt, ids = data.draw(ids_strategy(tokenizer)), data.draw(ids_strategy(tokenizer))
    detokenizer = IncrementalDetokenizer(
        tokenizer, pack_tokens(prompt), skip_special_tokens=skips, repeats_partial=repeats
    )
    if at_once:
        text = detokenizer.decode_all(ids)
    else:
        text = "".join(push_in_pieces(detokenizer, ids, cuts)) + detokenizer.finish()
    before = expected_text(tokenizer, prompt, skip_special_tokens=skips)
    whole = expected_text(tokenizer, prompt + ids, skip_special_tokens=skips)
    n_partial = detokenizer.n_partial
    assert before.endswith("\ufffd" * n_partial)
    if repeats:
        assert before[: len(before) - n_partial] + text == whole
    else:
        n_same = next(
            (i for i, pair in enumerate(zip(before, whole, strict=False)) if len({*pair}) == 2), len(before)
        )
        assert text == whole[n_same:]
    assert detokenizer.n_characters == len(text)


@pytest.mark.parametrize("n_before", [0, 1, 5000])
def test_a_character_that_the_prompt_begins_appears_with_its_last_byte(
    byte_tokenizer: CountingTokenizer, n_before: int
) -> None:
    first, *rest = "🎉".encode()
    prompt = pack_tokens([*b"x" * n_before, first])
    assert [IncrementalDetokenizer(byte_tokenizer, prompt).push(ids) for ids in (rest, b"x")] == ["🎉", "x"]
    whole = IncrementalDetokenizer(byte_tokenizer, prompt, repeats_partial=True)
    assert whole.n_partial == 1
    assert whole.push(b"x") == "\ufffdx"
    assert byte_tokenizer.n_decoded < 200


def test_special_tokens_are_shown_where_they_stand(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.vocab_size - 4, tokenizer.vocab_size - 3
    ids = [start, tokenizer.vocab_size - 2, end]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert text.replace(" ", "") == "<s><tool></s>"
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


@MANY
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=60), cuts=CUTS)
def test_no_piece_contains_part_of_a_character(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    encoded = tokenizer.encode(text)
    ids = [int.from_bytes(encoded[at : at + 4], "little") for at in range(0, len(encoded), 4)]
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = push_in_pieces(detokenizer, ids, cuts)
    full_text = tokenizer.decode(ids)
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in full_text
    assert "".join([*pieces, detokenizer.finish()]) == full_text


def test_a_character_appears_with_its_last_byte(byte_tokenizer: CountingTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer)
    assert [detokenizer.push([byte]) for byte in "é🎉".encode()] == ["", "é", "", "", "", "🎉"]


def test_an_incomplete_character_is_shown_at_the_end_only(byte_tokenizer: CountingTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer)
    assert [detokenizer.push([byte]) for byte in "🎉".encode()[:3]] == ["", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_tokens_without_text_inside_a_character_do_not_break_it(byte_tokenizer: CountingTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer)
    first, *rest = "🎉".encode()
    beyond_vocabulary = 300
    ids = [*b"0123456789", first, *[beyond_vocabulary] * 40, *rest]
    assert "".join(detokenizer.push([token]) for token in ids) == "0123456789🎉"


@pytest.mark.parametrize("text", ["a", "é", "日本", "🎉", "\ufffd"])
def test_work_per_token_does_not_grow_with_the_answer(byte_tokenizer: CountingTokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer)
    ids = list(text.encode()) * 2000
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join([*pieces, detokenizer.finish()]) == text * 2000
    assert byte_tokenizer.n_decoded < 20 * len(ids)


@pytest.mark.parametrize("byte", [0x80, 0xE4, 0xF0, 0xFF])
def test_work_per_token_does_not_grow_when_no_character_ever_ends(
    byte_tokenizer: CountingTokenizer, byte: int
) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer)
    pieces = [detokenizer.push([byte]) for _ in range(3000)]
    assert "".join([*pieces, detokenizer.finish()]) == "\ufffd" * 3000
    assert byte_tokenizer.n_decoded < 20 * 3000


def test_a_character_of_single_byte_tokens_appears_with_its_last_byte() -> None:
    detokenizer = IncrementalDetokenizer(CountingTokenizer(single_bytes()))
    pieces = [detokenizer.push([byte]) for byte in "日\né🎉".encode()]
    assert pieces == ["", "", "日", "\n", "", "é", "", "", "", "🎉"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ("日本".encode() + b"\xff", "日本\ufffd"),
        (b"\n\xff\n", "\n\ufffd\n"),
        ("日".encode()[:2] + b"\n", "\ufffd\ufffd\n"),
        ("日".encode()[:2] + "é".encode(), "\ufffd\ufffdé"),
        (b"\xed\xa0\x80", "\ufffd" * 3),  # a surrogate is no character
        (b"\xed\xa0\n", "\ufffd\ufffd\n"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
@pytest.mark.parametrize("tail", [[], [256]])
def test_an_invalid_byte_leaves_the_characters_around_it_intact(run: bytes, text: str, tail: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(CountingTokenizer(single_bytes()))
    pieces = [detokenizer.push([token]) for token in [256, *run, *tail]]
    assert "".join([*pieces, detokenizer.finish()]) == "x" + text + "x" * len(tail)


@pytest.mark.parametrize("run", [b"a", "日".encode(), b"\xff", b"\xe6\x97"])
def test_work_per_token_does_not_grow_with_a_run_of_single_bytes(run: bytes) -> None:
    tokenizer = CountingTokenizer(single_bytes())
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([byte]) for byte in run * 1000]
    assert "".join([*pieces, detokenizer.finish()]) == run.decode(errors="each byte") * 1000
    assert tokenizer.n_decoded < 60 * 1000 * len(run)


def test_byte_names_are_text_without_byte_fallback() -> None:
    detokenizer = IncrementalDetokenizer(Tokenizer(Backend(models.WordLevel({"<0xE6>": 0, "<0x0A>": 1}, "?"))))
    assert [detokenizer.push([0]), detokenizer.push([1]), detokenizer.finish()] == ["<0xE6>", " <0x0A>", ""]


@pytest.fixture(params=[decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel()])], ids=["bytes", "units"])
def byte_tokenizer(request: pytest.FixtureRequest) -> CountingTokenizer:
    """A tokenizer whose token ids are bytes, in the byte-level alphabet. ``units`` hides the decoder's kind."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    vocabulary = {chr(byte if byte in visible else 256 + hidden.index(byte)): byte for byte in range(256)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = request.param
    return CountingTokenizer(backend)


class CountingTokenizer(Tokenizer):
    """A tokenizer that counts the tokens it decodes."""

    n_decoded = 0

    def decode_tokens(self, tokens: Sequence[str]) -> str:
        self.n_decoded += len(tokens)
        return super().decode_tokens(tokens)
