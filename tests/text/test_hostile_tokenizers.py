"""Tokenizers that take any time or memory are given up, and encode the next text."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from radixkv.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from radixkv.text import guarded_encoder
from radixkv.text.panics import TokenizerFailed
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from support.cases import rest_nightly
from support.hostile_tokenizers import HOSTILE, MULTIPLYING_ANY_TEXT, byte_level, give_up_soon, splitting
from support.processes import children

TINY = Path(guarded_encoder.__file__).parents[1] / "checkpoints" / "tiny"
PROCESS = "radixkv.text.encoder_process"
TEXT = "ÿÿ" * 20 + "a" * 100_000 + "ÿ"
"""Each hostile tokenizer fails with it."""


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_soon(monkeypatch)


@pytest.mark.parametrize("name", rest_nightly(HOSTILE, kept=(0, 3)))
def test_a_text_that_cannot_be_encoded_is_an_error_and_others_are_encoded(name: str) -> None:
    backend = HOSTILE[name]()
    tokenizer = Tokenizer(backend)
    assert not tokenizer.is_bounded
    quick = "b"
    with pytest.raises(TokenizerFailed, match="the tokenizer of this checkpoint cannot encode the text"):
        tokenizer.encode(TEXT)
    failed, encoded, refused = tokenizer.encode_batch([TEXT, quick, "\ud800"])
    assert isinstance(failed, TokenizerFailed)
    assert isinstance(refused, InvalidRequest)
    if name in MULTIPLYING_ANY_TEXT:
        assert isinstance(encoded, TokenizerFailed)
    else:
        assert isinstance(encoded, bytes)
        assert unpack_tokens(encoded) == backend.encode(quick).ids


def test_an_unknown_pattern_encodes_as_without_a_guard() -> None:
    backend = splitting(r"[a-z]+|\d|.")
    tokenizer = Tokenizer(backend)
    assert not tokenizer.is_bounded
    for text in ("", "a cat, 12 dogs", "日本語 " * 9000):
        for adds in (False, True):
            encoded = tokenizer.encode(text, adds_special_tokens=adds)
            assert unpack_tokens(encoded) == backend.encode(text, add_special_tokens=adds).ids
    with pytest.raises(ContextLengthExceeded, match="it has 14 tokens"):
        tokenizer.encode("a cat, 12 dogs", 13)
    assert len(tokenizer.encode("a cat, 12 dogs", 14)) == 14 * 4


def test_a_killed_process_is_started_again_and_ends_with_its_tokenizer() -> None:
    gc.collect()  # what other tests have left
    before = set(children(os.getpid(), PROCESS))
    tokenizer = Tokenizer(splitting("x|."))
    assert set(children(os.getpid(), PROCESS)) == before, "it is started when it is needed"
    tokenizer.encode("a")
    (first,) = set(children(os.getpid(), PROCESS)) - before
    os.kill(first, signal.SIGKILL)
    with pytest.raises(TokenizerFailed):
        tokenizer.encode("a")
    tokenizer.encode("a")
    (second,) = set(children(os.getpid(), PROCESS)) - before
    assert second != first
    del tokenizer
    gc.collect()
    assert set(children(os.getpid(), PROCESS)) == before


def test_the_tokenizers_of_models_are_known_to_be_bounded(tokenizer: Tokenizer) -> None:
    assert tokenizer.is_bounded
    assert Tokenizer.load(TINY).is_bounded


END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS_OF_MODELS = {
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END,
    "Qwen 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END,
    "Qwen 3.5": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + END,
    "GPT-OSS": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END,
    "Tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END,
}


@pytest.mark.parametrize("model", WORDS_OF_MODELS)
def test_the_words_of_models_are_known_to_be_bounded(model: str) -> None:
    assert Tokenizer(splitting(WORDS_OF_MODELS[model])).is_bounded
    assert not Tokenizer(splitting(WORDS_OF_MODELS[model] + "|x*x*x")).is_bounded


def test_the_steps_of_gemma_are_known_to_be_bounded() -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)]
    )
    assert Tokenizer(backend).is_bounded


def test_a_panic_in_this_process_is_an_error() -> None:
    """Oniguruma gives up a text with more than 10 million steps back."""
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer.is_bounded
    with pytest.raises(TokenizerFailed, match="retry-limit"):
        tokenizer.encode(" " * 10_100_000)
    assert tokenizer.encode("a")


def test_a_failure_that_is_no_panic_is_the_same_error() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="nothing"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.is_bounded
    for encode in (tokenizer.encode, tokenizer.encode_inline):
        with pytest.raises(TokenizerFailed, match="UNK"):
            encode("b")
        assert unpack_tokens(encode("a")) == [0]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    "step",
    [
        decoders.Replace(Regex("(a+)+$"), "b"),
        decoders.Replace("a", "b" * 1000),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b" * 1000)]),
    ],
)
def test_a_decoder_that_may_take_long_is_refused(folder: Path, step: decoders.Decoder) -> None:
    backend = byte_level()
    backend.decoder = step
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="has the decoder 'Replace'"):
        Tokenizer.load(folder)


def test_a_tokenizer_that_cannot_be_read_is_a_checkpoint_error(folder: Path) -> None:
    layout = json.loads((folder / "tokenizer.json").read_text())
    layout["model"] = {"type": "Unigram", "vocab": [], "unk_id": 5}
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        Tokenizer.load(folder)
