"""Texts cut at separators have the ids of their parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from radixkv.text.tokenizer import Tokenizer
from support.cases import examples
from support.small_tokenizers import sentencepiece

END, CLOSE = "<|end|>", "</s>"
CORPUS = ["it's the end.\n\nNew  lines and 1234 more:\n- one\n<|start|>x = 10 <|end|>\n</s>\n" * 3]
WORDS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = st.lists(
    st.sampled_from([END, CLOSE, "<|start|>", "<tool>", "<|", "|>", "</", "s>", "\n", " ", "the", "12", "'s", "e"])
    | st.sampled_from(["\u0301", "é", "日", "<|end", "|end|>", "<|end|>x", "\u200b"]),
    max_size=12,
).map("".join)


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([END, CLOSE, "<|start|>"])
    backend.add_tokens(["<tool>"])
    return backend


def with_nfc_and_split_words() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def with_nested_sequences() -> tokenizers.Tokenizer:
    backend = with_nfc_and_split_words()
    backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer])
    return backend


MAKERS = (byte_level, with_nfc_and_split_words, with_nested_sequences)


def separators(backend: tokenizers.Tokenizer, *names: str) -> dict[str, int]:
    ids = [backend.token_to_id(name) for name in names or (END, CLOSE)]
    return Tokenizer(backend).separators([*ids, 100_000])


@examples(200)
@given(before=TEXTS, after=TEXTS)
@pytest.mark.parametrize("make", MAKERS, ids=["GPT-2", "Qwen", "nested"])
def test_a_text_has_the_ids_of_its_parts(make: Callable[[], tokenizers.Tokenizer], before: str, after: str) -> None:
    tokenizer = _TOKENIZERS[make.__name__]
    found = tokenizer.separators(range(tokenizer.vocab_size))
    assert found.keys() == {END, CLOSE, "<|start|>"}
    for separator in found:
        first, second = (tokenizer.encode(t, adds_special_tokens=False) for t in (before + separator, after))
        assert tokenizer.encode(before + separator + after, adds_special_tokens=False) == first + second


_TOKENIZERS = {make.__name__: Tokenizer(make()) for make in MAKERS}


def with_tokens(*tokens: AddedToken) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_tokens(list(tokens))
    return backend


def test_another_token_that_takes_a_part_of_the_text_forbids_the_cut() -> None:
    assert separators(byte_level()).keys() == {END, CLOSE}
    for other in ("x<|end|>", "<|end|>\n", "b<|e", "x<|end|>y"):
        assert separators(with_tokens(AddedToken(other))).keys() == {CLOSE}, other
    assert separators(with_tokens(AddedToken("a<"))) == {}
    assert separators(with_tokens(AddedToken("|>\n"))).keys() == {END, CLOSE}, "the end token begins before it"


def test_tokens_that_look_around_forbid_all_cuts() -> None:
    for settings_of_token in ({"lstrip": True}, {"rstrip": True}, {"single_word": True}):
        assert separators(with_tokens(AddedToken("<x>", **settings_of_token))) == {}


def test_only_special_tokens_that_no_normalizer_changes_are_separators() -> None:
    assert separators(with_tokens(AddedToken("<x>", special=False)), "<x>") == {}
    assert separators(with_tokens(AddedToken("<x>", special=True, normalized=True)), "<x>") == {}
    assert separators(byte_level(), "the") == {}


def test_other_tokenizers_have_no_separators() -> None:
    lowercase, spaced, dropping = byte_level(), byte_level(), byte_level()
    lowercase.normalizer = normalizers.Lowercase()
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    dropping.model.dropout = 0.1
    pieces = sentencepiece(decoders.Metaspace())
    pieces.add_special_tokens([END, CLOSE])
    for backend in (lowercase, spaced, dropping, pieces):
        assert separators(backend) == {}
