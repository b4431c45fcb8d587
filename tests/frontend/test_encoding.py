from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
import tokenizers
from scripted import EOS, ScriptedLoop
from tokenizers import models, pre_tokenizers

from radixkv.errors import ContextLengthExceeded
from radixkv.frontend.openai import Served, to_prompts
from radixkv.frontend.schema import CompletionRequest
from radixkv.text.tokenizer import Tokenizer


def backend(*steps: pre_tokenizers.PreTokenizer, leave_out: str = "") -> tokenizers.Tokenizer:
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(leave_out))
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate([*alphabet, "he"])}, [("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


def test_other_requests_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """The event loop's longest pause is a small part of the time that encoding takes."""
    ready = msgspec.structs.replace(ScriptedLoop().ready, max_model_len=1_000_000, n_pages=1_000_000)
    served = Served("echo", "some/echo", ready, tokenizer, frozenset({EOS}), 0, 5)
    request = CompletionRequest(prompt="hello world " * 250_000)

    async def longest_pause() -> tuple[float, float]:
        begun = last = time.perf_counter()
        encoding = asyncio.create_task(to_prompts(request, served))
        longest = 0.0
        while not encoding.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        with pytest.raises(ContextLengthExceeded, match="3000000 tokens"):
            await encoding
        return longest, last - begun

    pause, whole = asyncio.run(longest_pause())
    assert pause < whole / 4


def test_the_longest_token_is_known_for_complete_byte_level_vocabularies(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token_characters == len("<eos>")
    assert Tokenizer(backend()).longest_token_characters == 2
    isolated = pre_tokenizers.Split(" ", "isolated")
    assert Tokenizer(backend(isolated)).longest_token_characters == 2


def test_the_longest_token_is_unknown_where_characters_may_vanish(tmp_path: Path) -> None:
    removing = backend(pre_tokenizers.Split(" ", "removed"))
    assert len(removing.encode(" " * 100).ids) == 0
    incomplete = backend(leave_out="x")
    assert len(incomplete.encode("x" * 100).ids) == 0
    normalizing, stripping = backend(), backend()
    normalizing.normalizer = tokenizers.normalizers.Strip()
    stripping.add_tokens([tokenizers.AddedToken("<eos>", lstrip=True)])
    assert len(stripping.encode(" " * 100 + "<eos>").ids) == 1
    for made in (removing, incomplete, normalizing, stripping, tokenizers.Tokenizer(models.WordPiece({"a": 0}))):
        assert Tokenizer(made).longest_token_characters is None
