"""Pieces of an answer are whole characters, and together the decode of all its ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from radixkv.text.detokenizer import IncrementalDecoder
from radixkv.text.tokenizer import Tokenizer
from support.text_oracle import answer_text

MANY = settings(max_examples=150, deadline=None)

CUTS = st.lists(st.integers(0, 5), max_size=80)
"""How many ids each push brings; what is left comes one by one."""


def ids_strategy(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Mostly ids of the whole vocabulary, some beyond it, and runs of one id, which keep a character open."""
    run = st.tuples(st.integers(0, tokenizer.vocab_size + 3), st.sampled_from([1, 1, 1, 2, 40]))
    return st.lists(run, max_size=40).map(lambda runs: [token for token, length in runs for _ in range(length)])


def pushed(decoder: IncrementalDecoder, ids: Sequence[int], cuts: list[int]) -> list[str]:
    pieces = []
    rest = list(ids)
    for cut in cuts:
        pieces.append(decoder.push(rest[:cut]))
        rest = rest[cut:]
    pieces += [decoder.push([token]) for token in rest]
    return pieces


@MANY
@given(data=st.data(), cuts=CUTS, skips=st.booleans())
def test_pieces_together_are_the_text_of_all_ids(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skips: bool
) -> None:
    ids = data.draw(ids_strategy(tokenizer))
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skips)
    text = "".join(pushed(decoder, ids, cuts)) + decoder.finish()
    assert text == answer_text(tokenizer, ids, skip_special_tokens=skips)
    assert decoder.n_characters == len(text)


def test_special_tokens_are_shown_where_they_stand(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.vocab_size - 4, tokenizer.vocab_size - 3
    ids = [start, tokenizer.vocab_size - 2, end]
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    text = "".join(decoder.push([token]) for token in ids) + decoder.finish()
    assert text.replace(" ", "") == "<s><tool></s>"
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


@MANY
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=60), cuts=CUTS)
def test_no_piece_holds_part_of_a_character(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    encoded = tokenizer.encode(text)
    ids = [int.from_bytes(encoded[at : at + 4], "little") for at in range(0, len(encoded), 4)]
    decoder = IncrementalDecoder(tokenizer)
    pieces = pushed(decoder, ids, cuts)
    whole = tokenizer.decode(ids)
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in whole
    assert "".join([*pieces, decoder.finish()]) == whole


def test_a_character_appears_with_its_last_byte(byte_tokenizer: CountingTokenizer) -> None:
    decoder = IncrementalDecoder(byte_tokenizer)
    assert [decoder.push([byte]) for byte in "é🎉".encode()] == ["", "é", "", "", "", "🎉"]


def test_an_incomplete_character_is_shown_at_the_end_only(byte_tokenizer: CountingTokenizer) -> None:
    decoder = IncrementalDecoder(byte_tokenizer)
    assert [decoder.push([byte]) for byte in "🎉".encode()[:3]] == ["", "", ""]
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


def test_tokens_without_text_inside_a_character_do_not_break_it(byte_tokenizer: CountingTokenizer) -> None:
    decoder = IncrementalDecoder(byte_tokenizer)
    first, *rest = "🎉".encode()
    beyond_vocabulary = 300
    ids = [*b"0123456789", first, *[beyond_vocabulary] * 40, *rest]
    assert "".join(decoder.push([token]) for token in ids) == "0123456789🎉"


@pytest.mark.parametrize("text", ["a", "é", "日本", "🎉", "\ufffd"])
def test_work_per_token_does_not_grow_with_the_answer(byte_tokenizer: CountingTokenizer, text: str) -> None:
    decoder = IncrementalDecoder(byte_tokenizer)
    ids = list(text.encode()) * 2000
    pieces = [decoder.push([token]) for token in ids]
    assert "".join([*pieces, decoder.finish()]) == text * 2000
    assert byte_tokenizer.n_decoded < 20 * len(ids)


@pytest.mark.parametrize("byte", [0x80, 0xE4, 0xF0, 0xFF])
def test_work_per_token_does_not_grow_when_no_character_ever_ends(
    byte_tokenizer: CountingTokenizer, byte: int
) -> None:
    decoder = IncrementalDecoder(byte_tokenizer)
    pieces = [decoder.push([byte]) for _ in range(3000)]
    assert "".join([*pieces, decoder.finish()]) == "\ufffd" * 3000
    assert byte_tokenizer.n_decoded < 20 * 3000


def test_a_character_of_single_byte_tokens_appears_with_its_last_byte() -> None:
    decoder = IncrementalDecoder(named_bytes())
    assert [decoder.push([byte]) for byte in "日\né🎉".encode()] == ["", "", "日", "\n", "", "é", "", "", "", "🎉"]
    assert decoder.finish() == ""


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
def test_a_bad_byte_spoils_no_character_of_its_run(run: bytes, text: str, tail: list[int]) -> None:
    decoder = IncrementalDecoder(named_bytes())
    pieces = [decoder.push([token]) for token in [256, *run, *tail]]
    assert "".join([*pieces, decoder.finish()]) == "x" + text + "x" * len(tail)


@pytest.mark.parametrize("run", [b"a", "日".encode(), b"\xff", b"\xe6\x97"])
def test_work_per_token_does_not_grow_with_a_run_of_single_bytes(run: bytes) -> None:
    tokenizer = named_bytes()
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([byte]) for byte in run * 1000]
    assert "".join([*pieces, decoder.finish()]) == run.decode(errors="each byte") * 1000
    assert tokenizer.n_decoded < 60 * 1000 * len(run)


def test_names_of_bytes_are_text_where_the_decoder_takes_them_as_text() -> None:
    decoder = IncrementalDecoder(Tokenizer(Backend(models.WordLevel({"<0xE6>": 0, "<0x0A>": 1}, "?"))))
    assert [decoder.push([0]), decoder.push([1]), decoder.finish()] == ["<0xE6>", " <0x0A>", ""]


def named_bytes() -> CountingTokenizer:
    """Token id = byte, named as sentencepiece does; 256 is x."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return CountingTokenizer(backend)


@pytest.fixture(params=[decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel()])], ids=["bytes", "units"])
def byte_tokenizer(request: pytest.FixtureRequest) -> CountingTokenizer:
    """Token id = byte, as byte-level vocabularies name them; by a decoder that is known to be one, and not."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    vocabulary = {chr(byte if byte in visible else 256 + hidden.index(byte)): byte for byte in range(256)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = request.param
    return CountingTokenizer(backend)


class CountingTokenizer(Tokenizer):
    """Counts the tokens it decodes."""

    n_decoded = 0

    def join(self, tokens: Sequence[str]) -> str:
        self.n_decoded += len(tokens)
        return super().join(tokens)
