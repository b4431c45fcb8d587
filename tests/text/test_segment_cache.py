"""Tests of the segment cache: ids equal those of the unsplit text, with and without cached segments."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from radixkv.text import segment_cache
from radixkv.text.segment_cache import SegmentCache
from support.cases import examples

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN = rf"{WORDS}|\p{{N}}|{REST}"
CORPUS = ["it's the end.\n\nNew  lines \n \nand 1234 more:\n- one\n- two!\r\nDon't\tstop;\n\n\n  x = 10\n" * 3]

CHARACTERS = "\n\t\r .'é日½\u0301\u00a0\u2028\x1c\x85\u200b\u180e🎉ſK"
STRINGS = ["\n\n", "  ", "\r\n", "'s", "the", "New", "12", "345", "e\u0301", "<|end|>", "<|end|>\n"]
TEXTS = st.lists(
    st.sampled_from([*CHARACTERS, *STRINGS])
    | st.text(max_size=4).filter(lambda text: not any("\ud800" <= letter <= "\udfff" for letter in text)),
    max_size=60,
).map("".join)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def trained(
    words: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    begin, end = (backend.token_to_id(name) for name in ("<|begin|>", "<|end|>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", begin), ("<|end|>", end)]
    )
    return backend


@pytest.fixture(
    scope="module",
    params=[
        (split(LLAMA_3), None),
        (split(QWEN), normalizers.NFC()),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    ],
    ids=["Llama 3", "Qwen", "GPT-2"],
)
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return trained(*request.param)


def encode_whole(backend: tokenizers.Tokenizer, text: str, *, adds_special: bool) -> bytes:
    """Encodes the unsplit text with the tokenizers package, as the oracle."""
    ids = backend.encode(text, add_special_tokens=adds_special).ids
    return struct.pack(f"<{len(ids)}i", *ids)


@examples(400)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), adds_special=st.booleans())
def test_ids_equal_those_of_the_unsplit_text(
    backend: tokenizers.Tokenizer, texts: Sequence[str], adds_special: bool
) -> None:
    cache = SegmentCache.create(backend, min_segment_characters=1)
    for _ in range(2):
        expected = [encode_whole(backend, text, adds_special=adds_special) for text in texts]
        assert cache.encode_batch(texts, adds_special_tokens=adds_special) == expected
        assert [cache.encode_inline(text, adds_special_tokens=adds_special) for text in texts] == expected


def test_ids_of_all_short_texts_around_a_cut(backend: tokenizers.Tokenizer) -> None:
    cache = SegmentCache.create(backend, min_segment_characters=1)
    parts = ["\n", " ", "\r", "\t", ".", "'", "s", "T", "7", "é", "<|end|>"]
    texts = [
        "".join(chosen)
        for chosen in itertools.product(parts, parts, ["\n"], ["T", "7", "s", "é", " "], ["\n", "s"])
    ]
    assert cache.encode_batch(texts, adds_special_tokens=False) == [
        encode_whole(backend, text, adds_special=False) for text in texts
    ]


class CountingBackend:
    """A backend that records the texts it encodes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.calls: list[list[str]] = []

    @property
    def n_characters(self) -> int:
        return sum(len(text) for texts in self.calls for text in texts)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
        self.calls.append(texts)
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def counting_cache(backend: tokenizers.Tokenizer, **limits: int) -> tuple[SegmentCache, CountingBackend]:
    counting = CountingBackend(backend)
    cache = SegmentCache(counting, needs_text_before=True, added_ids=(b"", b""), **limits)  # type: ignore[arg-type]
    return cache, counting


EXAMPLES = "".join(f"Question {i}: how many are {i} and {i}?\nAnswer: {2 * i}, of course.\n" for i in range(100))


def test_shared_segments_are_encoded_once(backend: tokenizers.Tokenizer) -> None:
    cache, counting = counting_cache(backend)
    cache.encode_batch([EXAMPLES], adds_special_tokens=False)
    for i in range(10):
        before = counting.n_characters
        text = f"{EXAMPLES}Question: {i}?\nAnswer:"
        assert cache.encode_batch([text], adds_special_tokens=False) == [
            encode_whole(backend, text, adds_special=False)
        ]
        assert counting.n_characters - before < segment_cache.MIN_SEGMENT_CHARACTERS + 200
    before = counting.n_characters
    cache.encode_batch([f"{EXAMPLES}{i}\nx" for i in range(10)], adds_special_tokens=False)
    assert counting.n_characters - before < 10 * (segment_cache.MIN_SEGMENT_CHARACTERS + 100)


def test_segments_are_found_in_their_namespace_only(backend: tokenizers.Tokenizer) -> None:
    cache, counting = counting_cache(backend)
    expected = encode_whole(backend, EXAMPLES, adds_special=False)
    for namespace in ("", "a", "b"):
        before = counting.n_characters
        assert cache.encode_batch([EXAMPLES], adds_special_tokens=False, namespace=namespace) == [expected]
        assert counting.n_characters - before == len(EXAMPLES), "as if nobody had sent it before"
        assert cache.encode_inline(EXAMPLES, adds_special_tokens=False, namespace=namespace) == expected
        assert counting.n_characters - before == len(EXAMPLES)
    odd = f"a\0{EXAMPLES}"
    assert cache.encode_batch([odd], adds_special_tokens=False) == [encode_whole(backend, odd, adds_special=False)]


def test_the_cache_is_bounded(backend: tokenizers.Tokenizer) -> None:
    cache, counting = counting_cache(backend, max_cached_characters=5 * len(EXAMPLES) // 2)

    def count_encoded_characters(*texts: str) -> int:
        before = counting.n_characters
        cache.encode_batch(texts, adds_special_tokens=False)
        return counting.n_characters - before

    first, second, third = (EXAMPLES.replace("Question", f"Exercise {i}") for i in range(3))
    assert count_encoded_characters(first)
    assert count_encoded_characters(second)
    assert count_encoded_characters(first) == 0
    assert count_encoded_characters(third)
    assert count_encoded_characters(first) == 0
    assert count_encoded_characters(second)
    long = "x" * (segment_cache.MAX_CACHED_SEGMENT_CHARACTERS + 1)
    assert count_encoded_characters(long) == count_encoded_characters(long) == len(long)


def test_short_texts_count_as_the_minimum_segment_length(backend: tokenizers.Tokenizer) -> None:
    cache, counting = counting_cache(backend, max_cached_characters=4 * segment_cache.MIN_SEGMENT_CHARACTERS)
    for text in ("one", "two", "three", "four", "two", "five", "two", "one"):
        assert cache.encode_inline(text, adds_special_tokens=False) == encode_whole(
            backend, text, adds_special=False
        )
    assert counting.n_characters == len("onetwothreefourfiveone")


def test_one_text_is_encoded_segment_by_segment_and_many_in_batches(backend: tokenizers.Tokenizer) -> None:
    """The package runs a batch of one on the calling thread, and a larger one on its thread pool."""
    cache, counting = counting_cache(backend, max_batch_characters=1000)
    assert cache.encode_inline(EXAMPLES, adds_special_tokens=True) == encode_whole(
        backend, EXAMPLES, adds_special=False
    )
    assert all(len(texts) == 1 for texts in counting.calls)
    cache, counting = counting_cache(backend, max_batch_characters=1000)
    one_line = "x " * 1000
    texts = [EXAMPLES, one_line, "short"]
    assert cache.encode_batch(texts, adds_special_tokens=True) == [
        encode_whole(backend, text, adds_special=False) for text in texts
    ]
    assert [one_line] in counting.calls
    sizes = [sum(map(len, batch)) for batch in counting.calls if batch != [one_line]]
    assert sum(sizes) == len(EXAMPLES) + len("short")
    assert all(600 < size <= 1000 for size in sizes[:-2])
    assert all(size <= 1000 for size in sizes)


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer_with(**changes: object) -> tokenizers.Tokenizer:
    backend = trained(split(QWEN))
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        tokenizer_with(normalizer=normalizers.Lowercase()),
        tokenizer_with(pre_tokenizer=pre_tokenizers.Metaspace()),
        tokenizer_with(pre_tokenizer=None),
        tokenizer_with(pre_tokenizer=split(r"\p{L}+|.")),
        tokenizer_with(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        tokenizer_with(model=models.WordLevel({"a": 0}, "a")),
        tokenizer_with(post_processor=processors.TemplateProcessing(single="$A $A", special_tokens=[])),
        tokenizer_with(model=models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, [], dropout=0.5)),
        tokenizer_with(model=models.BPE({letter: i for i, letter in enumerate(ALPHABET[1:])}, [])),
    ],
    ids=[
        "normalizer",
        "metaspace",
        "none",
        "another pattern",
        "prefix space",
        "model",
        "repeated",
        "dropout",
        "missing byte",
    ],
)
def test_unknown_tokenizers_are_not_cached(backend: tokenizers.Tokenizer) -> None:
    assert SegmentCache.create(backend) is None


@pytest.mark.parametrize(
    "token", [AddedToken("a\nb"), AddedToken("ab", lstrip=True), AddedToken("ab", single_word=True)]
)
def test_tokenizers_with_context_dependent_added_tokens_are_not_cached(token: AddedToken) -> None:
    backend = trained(split(QWEN))
    backend.add_tokens([token])
    assert SegmentCache.create(backend) is None
