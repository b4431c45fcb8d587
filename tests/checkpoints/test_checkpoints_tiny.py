"""Tests of the embedded model's files: completeness, size, and agreement with Transformers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

from radixkv.checkpoints import resolve
from radixkv.checkpoints.embedded import check_complete
from radixkv.errors import CheckpointError
from radixkv.lab.bench.workloads.chat import generate_chats
from radixkv.llm import LLM
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.sampling import SamplingParams

MEGABYTE = 1_000_000
TEXT = (
    "Question: A baker makes 24 loaves of bread every morning. She sells half of them before noon and "
    "then a quarter of the remaining loaves in the afternoon. How many loaves does she have left at the end of "
    "the day?\nAnswer: Before noon she sells 24 / 2 = 12 loaves. In the afternoon she sells 12 / 4 = 3 loaves."
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("tiny").folder


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(device="cpu", max_total_tokens=1024, max_model_len=512)
    yield llm
    llm.shutdown()


def test_the_files_are_small_enough_for_a_package(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(sizes.values()) <= 25 * MEGABYTE
    assert max(sizes.values()) <= 12 * MEGABYTE
    assert "README.md" in sizes


def test_it_is_a_llama_checkpoint_in_bfloat16(folder: Path) -> None:
    checkpoint = resolve("tiny")
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["head_dim"] == 64
    assert checkpoint.max_position_embeddings == 8192
    n_parameters = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as shard:
            parts = [shard.get_slice(name) for name in sorted(shard.keys())]
            assert {part.get_dtype() for part in parts} == {"BF16"}
            n_parameters += sum(int(np.prod(part.get_shape())) for part in parts)
    assert n_parameters <= 12_000_000


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return np.frombuffer(tokenizer.encode(text), dtype="<i4").tolist()


def test_the_tokenizer_fits_the_model(folder: Path) -> None:
    tokenizer, oracle, checkpoint = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder), resolve("tiny")
    assert tokenizer.vocab_size <= checkpoint.vocab_size
    text = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n\n#### 72 \t日本語 🎉 naïve"
    ids = ids_of(tokenizer, text)
    assert ids == oracle.encode(text)
    assert ids[0] == checkpoint.config["bos_token_id"] == oracle.bos_token_id
    assert tokenizer.decode(ids) == text
    assert oracle.eos_token_id in checkpoint.eos_token_ids
    assert checkpoint.eos_token_ids == set(oracle.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"]))
    assert len(ids_of(tokenizer, TEXT)) < len(TEXT) / 2.5


def test_chat_prompts_equal_those_of_transformers(llm: LLM, folder: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(folder)
    text = oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>")
    assert llm.chat_prompt(CHAT) == oracle.encode(text, add_special_tokens=False)


def test_chats_end_after_the_answer_with_the_default_sampling(llm: LLM) -> None:
    """Sampled from the whole distribution, one chat in eight continues with a role's name after its answer."""
    questions = [chat.turns[0][0] for chat in islice(generate_chats(5, 1), 48)]
    default = msgspec.structs.replace(llm.get_default_sampling_params(), max_tokens=64)
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for question in questions],
        [msgspec.structs.replace(default, seed=seed) for seed in range(len(questions))],
    )
    texts = [output.outputs[0].text for output in outputs]
    assert [text for text in texts if re.search(r"\S(user|assistant|system)", text)] == []
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert default.temperature == 1.0
    assert len(set(texts)) > len(set(questions)) / 2


def test_logprobs_equal_those_of_transformers_in_float32(llm: LLM, folder: Path) -> None:
    (output,) = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (answer,), n_prompt = output.outputs, len(output.prompt_token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*output.prompt_token_ids, *answer.token_ids]])).logits[0]
    expected = logits.log_softmax(dim=-1)[n_prompt - 1 :]
    for found, row in zip(answer.logprobs, expected, strict=False):
        assert {token: entry.logprob for token, entry in found.items()} == pytest.approx(
            {token: row[token].item() for token in found}, abs=1e-4
        )
        assert row.max().item() == pytest.approx(next(iter(found.values())).logprob, abs=1e-4)


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncated(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 1000)


def written(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def zeroed(name: str) -> Callable[[Path], object]:
    """Overwrites a file with zeros: a crash may leave that of a file whose blocks were not written yet."""
    return lambda folder: (folder / name).write_bytes(bytes((folder / name).stat().st_size))


SHARD = sorted(path.name for path in resolve("tiny").folder.glob("*.safetensors"))[-1]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed("config.json"), "config.json"),
        (removed("tokenizer.json"), "tokenizer.json"),
        (removed(INDEX), INDEX),
        (truncated(INDEX), "line"),
        (written(INDEX, "[]"), f"{INDEX} .*list"),
        (written(INDEX, '{"weight_map": {}}'), f"{INDEX} is not .*metadata"),
        (written(INDEX, '{"weight_map": {"a": 1}, "metadata": {"total_size": 1}}'), f"{INDEX} is not "),
        (removed(SHARD), SHARD),
        (truncated(SHARD), f"{SHARD} have .* bytes"),
        (zeroed(SHARD), f"{SHARD} cannot be read"),
        (truncated("tokenizer.json"), "tokenizer.json cannot be read"),
        (written("config.json", "{" * 100_000), "config.json cannot be read"),
        (written("generation_config.json", "5"), "generation_config.json .*int, not an object"),
        (shutil.rmtree, "No such file"),
    ],
)
def test_a_damaged_model_is_rejected(
    folder: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "tiny")
    check_complete(copy)
    damage(copy)
    with pytest.raises(CheckpointError, match=rf"the embedded model in .*{message}.*; reinstall radixkv"):
        check_complete(copy)
