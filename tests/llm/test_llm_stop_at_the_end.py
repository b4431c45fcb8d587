"""Tests of stop strings that the last token completes, even if its text is only certain at the answer's end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from radixkv.llm import LLM
from radixkv.wire.sampling import SamplingParams
from support.checkpoints import VOCAB, save_llama


def write_tokenizer(folder: Path, names: dict[int, str]) -> None:
    """Writes a tokenizer with single-byte tokens like Llama 2's."""
    vocabulary = {names.get(token, f"t{token}"): token for token in range(VOCAB)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(("name", "stop"), [("<0x0A>", "\n"), ("<0xE6>", "\N{REPLACEMENT CHARACTER}")])
def test_a_stop_string_in_the_last_token_is_the_reason(tmp_path: Path, name: str, stop: str) -> None:
    save_llama(tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (plain,) = LLM(str(tmp_path), max_total_tokens=1024).generate([[5, 6, 7]], greedy)
    (token,) = plain.outputs[0].token_ids
    write_tokenizer(tmp_path, {token: name})
    stopping = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, stop=(stop,))
    (stopped,) = LLM(str(tmp_path), max_total_tokens=1024).generate([[5, 6, 7]], stopping)
    assert stopped.outputs[0].token_ids == [token]
    assert stopped.outputs[0].text == ""
    assert stopped.outputs[0].finish_reason == "stop"
