"""Tests of encoding and decoding, and of their errors."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, processors

from radixkv.errors import CheckpointError, InvalidRequest
from radixkv.text.tokenizer import Tokenizer
from support.imports import imported_by


def save(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def word_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 70_000}, "?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def test_ids_are_little_endian_int32_with_the_post_processors_tokens(tmp_path: Path) -> None:
    tokenizer = save(word_level(), tmp_path)
    assert tokenizer.encode("a b zebra") == struct.pack("<4i", 0, 1, 2, 70_000)
    assert tokenizer.encode("") == struct.pack("<i", 0)
    assert tokenizer.decode([0, 1, 2]) == "a b"
    assert tokenizer.vocab_size == 4


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = word_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(save(backend, tmp_path).encode("a b a b a")) == 4 * 6


def test_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    backend = word_level()
    backend.add_tokens(["more"])
    assert save(backend, tmp_path).vocab_size == 5


@pytest.mark.parametrize("text", ["\ud800", "ab\udc00", "\ud83c \udf89"])
def test_lone_surrogate_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"lone surrogate U\+D[8-F][0-9A-F]{2} at character \d") as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing; .*token ids"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"version": "1.0", "model"', b'{"model": {"type": "BPE"}}', b"\xff\xfe\x00"]
)
def test_corrupt_file_is_one_line_with_the_reason(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"tokenizer.json (is not a tokenizer|cannot be read): .+; fetch"
    ) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_folder_instead_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_needs_neither_torch_nor_transformers() -> None:
    assert imported_by("radixkv.generation.answer_text", ("torch", "transformers")) == set()


def test_bytes_of_tokens_together_are_the_text(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode(" the cat: naïve 日本語 🎉 mat", adds_special_tokens=False)
    ids = [token for (token,) in struct.iter_unpack("<i", encoded)]
    text = b"".join(tokenizer.token_bytes(token) for token in ids).decode()
    # A decoder that drops the first space does so for whole texts only.
    assert text.lstrip() == tokenizer.decode(ids).lstrip()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.token_text(tokenizer.vocab_size - 4).strip() == "<s>"


def test_a_part_of_a_character_has_its_bytes_and_no_text() -> None:
    byte_level = tokenizers.Tokenizer(models.BPE({"æ": 0, "Ĺ": 1, "Ġa": 2}, []))
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(byte_level)
    assert [tokenizer.token_bytes(token) for token in range(3)] == [b"\xe6", b"\x97", b" a"]
    assert [tokenizer.token_text(token) for token in range(3)] == ["\ufffd", "\ufffd", " a"]


def test_special_tokens_of_its_own_can_be_left_out(tmp_path: Path) -> None:
    tokenizer = save(word_level(), tmp_path)
    assert tokenizer.encode("a b", adds_special_tokens=False) == struct.pack("<2i", 1, 2)
    assert tokenizer.encode("<s> a", adds_special_tokens=False) == struct.pack("<2i", 0, 1)
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<s> a"
    assert tokenizer.token(0) is None
    assert tokenizer.token(0, skip_special_tokens=False) == "<s>"


def test_the_vocabulary_has_what_each_token_adds_to_a_text(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary()
    encoded = tokenizer.encode("the cat sat on the mat. <tool>", adds_special_tokens=False)
    ids = [one for (one,) in struct.iter_unpack("<i", encoded)]
    (special,) = struct.unpack("<i", tokenizer.encode("</s>", adds_special_tokens=False)[-4:])

    assert len(vocabulary) >= tokenizer.vocab_size  # there may be ids without a token
    assert vocabulary[special] == b""
    # Some decoders drop the space at the start of a text.
    first, rest = ids[:1], ids[1:]
    assert tokenizer.decode(ids) == tokenizer.decode(first) + b"".join(vocabulary[one] for one in rest).decode()
