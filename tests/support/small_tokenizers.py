"""Small tokenizers of each kind that checkpoints use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from radixkv.text.tokenizer import Tokenizer

TEXT = "the cat sat on the mat. 12 + 34 = 46, naïve café; 日本語の文 🎉👍 done\n" * 4


def byte_level() -> tokenizers.Tokenizer:
    """Returns a tokenizer like GPT-2's and Llama 3's: every byte is a token, merges may cross characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    return backend


def byte_letters(
    merges: Sequence[tuple[str, str]] = (), special: Sequence[str] = (), pieces: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Returns a byte-level tokenizer whose token i is letter i of a byte; pieces follow, merges, special tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces, *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def with_yes_and_no() -> tokenizers.Tokenizer:
    """Returns a byte-level tokenizer with what a reranker's prompts and answers need."""
    return byte_letters([("y", "e"), ("ye", "s"), ("n", "o")], special=["<|im_start|>", "<|im_end|>"])


def single_bytes() -> tokenizers.Tokenizer:
    """Returns a tokenizer whose token ids are bytes, named as in sentencepiece; token 256 is x."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return backend


def sentencepiece(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """Returns a tokenizer like Llama 2's and Mistral's: spaces are ``▁``, unknown characters single-byte tokens."""
    pieces = ["▁", "▁▁", "▁the", "▁cat", "at", "s", "t", "e", "日", "é", ".", "�", "▁日本"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {"<unk>": 0} | {piece: index for index, piece in enumerate(pieces, start=1)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    return backend


@pytest.fixture(scope="session", params=["byte-level", "sentencepiece", "metaspace", "no decoder"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "byte-level":
        backend = byte_level()
    elif request.param == "sentencepiece":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend = sentencepiece(decoders.Sequence(steps))
    elif request.param == "metaspace":
        backend = sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
    else:
        backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(TEXT.split())}, "12"))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("<é日>", special=False)])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)
