"""Texts that are encoded in stretches have the ids that they have whole, also where stretches came before."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from radixkv.text import segment_cache
from radixkv.text.segment_cache import Stretches

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN = rf"{WORDS}|\p{{N}}|{REST}"
CORPUS = ["it's the end.\n\nNew  lines \n \nand 1234 more:\n- one\n- two!\r\nDon't\tstop;\n\n\n  x = 10\n" * 3]

TEXTS = st.lists(
    st.sampled_from(
        [
            "\n",
            "\n\n",
            " ",
            "  ",
            "\t",
            "\r",
            "\r\n",
            ".",
            "'s",
            "'",
            "the",
            "New",
            "12",
            "345",
            "é",
            "e\u0301",
            "日",
            "½",
        ]
        + ["\u0301", "\u00a0", "\u2028", "\x1c", "\x85", "\u200b", "\u180e", "🎉", "<|end|>", "<|end|>\n", "ſ", "K"]
    )
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


def whole(backend: tokenizers.Tokenizer, text: str, *, adds: bool) -> bytes:
    """The oracle: the package, asked for the whole text."""
    ids = backend.encode(text, add_special_tokens=adds).ids
    return struct.pack(f"<{len(ids)}i", *ids)


@settings(max_examples=400, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), adds=st.booleans())
def test_ids_are_those_of_the_whole_text(backend: tokenizers.Tokenizer, texts: Sequence[str], adds: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_cache, "MIN_CHARACTERS", 1)
        encoder = Stretches.of(backend)
        assert encoder is not None
        for _ in range(2):
            found = [whole(backend, text, adds=adds) for text in texts]
            assert encoder.encode_all(texts, adds_special_tokens=adds) == found
            assert [encoder.encode_here(text, adds_special_tokens=adds) for text in texts] == found


def test_every_short_text_around_a_cut(backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cache, "MIN_CHARACTERS", 1)
    encoder = Stretches.of(backend)
    assert encoder is not None
    parts = ["\n", " ", "\r", "\t", ".", "'", "s", "T", "7", "é", "<|end|>"]
    texts = [
        "".join(chosen)
        for chosen in itertools.product(parts, parts, ["\n"], ["T", "7", "s", "é", " "], ["\n", "s"])
    ]
    assert encoder.encode_all(texts, adds_special_tokens=False) == [
        whole(backend, text, adds=False) for text in texts
    ]


class Counting:
    """A backend that knows what it was given."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.calls: list[list[str]] = []

    @property
    def n_characters(self) -> int:
        return sum(len(text) for texts in self.calls for text in texts)

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
        self.calls.append(texts)
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def counted(backend: tokenizers.Tokenizer) -> tuple[Stretches, Counting]:
    counting = Counting(backend)
    return Stretches(counting, needs_text_before=True, around=(b"", b"")), counting  # type: ignore[arg-type]


EXAMPLES = "".join(f"Question {i}: how many are {i} and {i}?\nAnswer: {2 * i}, of course.\n" for i in range(100))


def test_what_prompts_share_is_encoded_once(backend: tokenizers.Tokenizer) -> None:
    encoder, counting = counted(backend)
    encoder.encode_all([EXAMPLES], adds_special_tokens=False)
    for i in range(10):
        before = counting.n_characters
        text = f"{EXAMPLES}Question: {i}?\nAnswer:"
        assert encoder.encode_all([text], adds_special_tokens=False) == [whole(backend, text, adds=False)]
        assert counting.n_characters - before < segment_cache.MIN_CHARACTERS + 200
    before = counting.n_characters
    encoder.encode_all([f"{EXAMPLES}{i}\nx" for i in range(10)], adds_special_tokens=False)
    assert counting.n_characters - before < 10 * (segment_cache.MIN_CHARACTERS + 100)


def test_what_is_kept_is_bounded(backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cache, "MAX_KEPT_CHARACTERS", 5 * len(EXAMPLES) // 2)
    encoder, counting = counted(backend)

    def asked(*texts: str) -> int:
        before = counting.n_characters
        encoder.encode_all(texts, adds_special_tokens=False)
        return counting.n_characters - before

    first, second, third = (EXAMPLES.replace("Question", f"Exercise {i}") for i in range(3))
    assert asked(first)
    assert asked(second)
    assert asked(first) == 0
    assert asked(third)
    assert asked(first) == 0
    assert asked(second)
    long = "x" * (segment_cache.MAX_CHARACTERS + 1)
    assert asked(long) == asked(long) == len(long)


def test_what_is_kept_of_short_texts_is_bounded(
    backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_cache, "MAX_KEPT_CHARACTERS", 4 * segment_cache.MIN_CHARACTERS)
    encoder, counting = counted(backend)
    for text in ("one", "two", "three", "four", "two", "five", "two", "one"):
        assert encoder.encode_here(text, adds_special_tokens=False) == whole(backend, text, adds=False)
    assert counting.n_characters == len("onetwothreefourfiveone")


def test_one_text_is_encoded_by_the_thread_that_asks_and_many_a_part_at_a_time(
    backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package gives several stretches to its own threads, which end those of one call before the next."""
    monkeypatch.setattr(segment_cache, "SHARED_CHARACTERS", 1000)
    encoder, counting = counted(backend)
    assert encoder.encode_here(EXAMPLES, adds_special_tokens=True) == whole(backend, EXAMPLES, adds=False)
    assert all(len(texts) == 1 for texts in counting.calls)
    encoder, counting = counted(backend)
    one_line = "x " * 1000
    texts = [EXAMPLES, one_line, "short"]
    assert encoder.encode_all(texts, adds_special_tokens=True) == [
        whole(backend, text, adds=False) for text in texts
    ]
    assert [one_line] in counting.calls
    sizes = [sum(map(len, part)) for part in counting.calls if part != [one_line]]
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
def test_of_other_tokenizers_nothing_is_known(backend: tokenizers.Tokenizer) -> None:
    assert Stretches.of(backend) is None


@pytest.mark.parametrize(
    "token", [AddedToken("a\nb"), AddedToken("ab", lstrip=True), AddedToken("ab", single_word=True)]
)
def test_added_tokens_that_look_around_are_found(token: AddedToken) -> None:
    backend = trained(split(QWEN))
    backend.add_tokens([token])
    assert Stretches.of(backend) is None
