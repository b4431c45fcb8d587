"""Chats go on from the ends of messages that no token ends which also ends answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv import LLM, SamplingParams
from support.cases import rest_nightly
from support.chat_templates import GPT_OSS
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, OTHERS
from support.small_tokenizers import byte_letters

SPECIAL = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
MODELS = {"gpt-oss": {**OTHERS["gpt-oss"], "sliding_window": 48}, "qwen3.5": HYBRIDS["qwen3.5"]}


@pytest.mark.parametrize(("name", "n_found"), rest_nightly([("gpt-oss", 432), ("qwen3.5", 384)], kept=(0,)))
def test_a_second_chat_finds_the_instructions_of_the_first(name: str, n_found: int, tmp_path: Path) -> None:
    """A turn of the model's own family comes before the instructions, so that they are not the first message."""
    fields = {**MODELS[name], "vocab_size": 280, "eos_token_id": 256 + SPECIAL.index("<|return|>")}
    save_checkpoint(tmp_path, **fields)
    byte_letters(special=SPECIAL).save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|return|>", "chat_template": GPT_OSS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chats = [
        [{"role": "system", "content": "Be brief. " * 38}, {"role": "user", "content": question * 20}]
        for question in ("Why? ", "How? ")
    ]
    with LLM(tmp_path, device="cpu", dtype="float32", max_model_len=768, max_total_tokens=4096) as llm:
        cached = [llm.chat([chat], PARAMS, use_tqdm=False)[0].num_cached_tokens for chat in chats]
    assert cached == [0, n_found]
