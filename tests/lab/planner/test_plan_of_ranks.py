"""Plans of several GPUs, against what ranks hold and what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv import LLM
from radixkv.checkpoints import Checkpoint, resolve
from radixkv.cli import main
from radixkv.errors import ConfigError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shards import Shard
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS
from support.json_lines import read_lines
from support.quantized_checkpoints import save_quantized
from support.rank_threads import RankThreads

PAGE_SIZE = 16
MODELS: dict[str, dict[str, Any]] = {
    name: CHECKPOINTS[name] | {"head_dim": 64}
    for name in ("grouped", "biased", "qwen2", "qwen3-moe", "gemma3", "gpt-oss", "mixtral")
} | {"opt": CHECKPOINTS["opt"] | {"hidden_size": 256, "word_embed_proj_dim": 256, "head_dim": 64}}
MODELS |= {
    name: CHECKPOINTS[name] | {"head_dim": 64, "global_head_dim": 128} for name in ("gemma4-shared", "gemma4-moe")
}
"""Small checkpoints with heads of a size that GPUs compute; most have 4 heads and 2 KV heads."""
QUANTIZED = ("fp8 channels", "fp8 blocks 128", "awq 32")
WITH_EVERY_CHANGE = {("gemma4-moe", 2), ("awq 32", 2)}
"""The other cases run only at night."""


def planned(folder: Path, model: str | Path, *flags: str) -> Any:
    """Returns the JSON line of a plan for a GPU of 24 GB."""
    file = folder / "plan.jsonl"
    assert main(["plan", str(model), "--gpu-memory", "24GB", *flags, "--output-file", str(file)]) == 0
    return read_lines(file)[-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "n_ranks"),
    [
        pytest.param(name, n, marks=[] if (name, n) in WITH_EVERY_CHANGE else pytest.mark.nightly)
        for name, n in [("tiny", 2), *product(MODELS, (2, 4)), *product(QUANTIZED, (2,))]
    ],
)
def test_bytes_are_those_that_each_rank_holds(tmp_path: Path, name: str, n_ranks: int) -> None:
    model: str | Path = name
    if name in QUANTIZED:
        save_quantized(tmp_path, name, hidden_size=256, intermediate_size=512, head_dim=128, num_attention_heads=4)
        model = tmp_path / "quantized"
    elif name != "tiny":
        model = tmp_path / name
        save_checkpoint(model, **MODELS[name])
    flags = ("--gpus", str(n_ranks), "--page-size", str(PAGE_SIZE), "--prompt", "100", "--answer", "10")
    plan = planned(tmp_path, model, *flags)
    checkpoint = resolve(str(model))
    settings = DeviceSettings(
        page_size=PAGE_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 22,
        dtype="bfloat16",
        tensor_parallel_size=n_ranks,
    )
    with RankThreads(checkpoint, settings, n_ranks) as ranks:
        for rank, executor in enumerate(ranks.executors):
            assert plan["weight_bytes"] == weight_bytes(checkpoint, Shard(rank, n_ranks))
            assert isinstance(executor.pool, KVPool)
            page_bytes = sum(part.k[:, 0].nbytes + part.v[:, 0].nbytes for part in executor.pool.parts)
            assert plan["pools"][0]["page_bytes"] == page_bytes


def weight_bytes(checkpoint: Checkpoint, shard: Shard) -> int:
    """Loads a rank's part of a model, with the weights that a GPU multiplies; returns the bytes of its tensors."""
    with open_weights(
        checkpoint,
        load_format="auto",
        dtype=torch.bfloat16,
        shard=shard,
        products=("fp8", "int4"),
        divides_head=True,
    ) as weights:
        layers = [weights.layer(index) for index in range(weights.config.n_layers)]
        parts = [weights.embedding(), weights.position_embedding(), weights.final_norm(), *layers]
        parts.append(weights.layer_inputs())
        if not weights.config.tied_head:
            parts.append(weights.head())
    storages = [tensor.untyped_storage() for part in parts for tensor in tensors(part)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif is_dataclass(part):
        for value in vars(part).values():
            yield from tensors(value)


def test_the_pool_of_two_gpus_has_what_their_weights_leave(tmp_path: Path) -> None:
    one, two = (planned(tmp_path, "tiny", "--gpus", n) for n in "12")
    assert (one["tensor_parallel_size"], two["tensor_parallel_size"]) == (1, 2)
    for before, after in zip(one["pools"], two["pools"], strict=True):
        assert after["kv_bytes_per_token"] * 2 == before["kv_bytes_per_token"]
        assert after["pool_bytes"] - before["pool_bytes"] == one["weight_bytes"] - two["weight_bytes"] > 0
        assert after["n_pages"] == after["pool_bytes"] // after["page_bytes"] - 1 > 2 * before["n_pages"]


def test_a_host_slot_has_the_parts_of_all_gpus(tmp_path: Path) -> None:
    """With four GPUs two have the same KV head, and its pages are in host memory once."""
    one, two, four = (planned(tmp_path, "tiny", "--gpus", n, "--host-memory", "1GiB")["pools"] for n in "124")
    for before, *after in zip(one, two, four, strict=True):
        assert [pool["n_host_slots"] for pool in after] == [before["n_host_slots"]] * 2


def test_the_flag_has_the_names_of_the_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--gpus", "--tensor-parallel-size", "--tp-size", "-tp")
    pools = [planned(tmp_path, "tiny", name, "2")["pools"] for name in names]
    assert pools == [pools[0]] * 4
    printed = capsys.readouterr().out
    assert printed.count("GPUs       2; ") == 4
    planned(tmp_path, "tiny")
    assert "GPUs" not in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], model: str | Path, *flags: str) -> str:
    """Returns the one line of a plan that is refused."""
    capsys.readouterr()
    assert main(["plan", str(model), "--gpu-memory", "24GB", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--gpus", "3"], {"tensor_parallel_size": 3}),
        (["--gpus", "8"], {"tensor_parallel_size": 8}),
    ],
)
def test_what_ranks_refuse_is_refused_in_their_words(
    flags: list[str], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        LLM("tiny", device="cpu", **settings)
    assert refusal(capsys, "tiny", *flags) == f"radixkv plan: error: {error.value}"


def test_the_error_of_a_large_model_names_as_many_gpus_as_hold_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    shape = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 28_672, "num_hidden_layers": 60}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5} | shape | heads))
    (n_gpus,) = re.findall(r"(\d) of these GPUs hold it \(--gpus \1\)", refusal(capsys, config))
    assert n_gpus == "4"
    assert planned(tmp_path, config, "--gpus", n_gpus)["pools"][0]["n_pages"] > 0
    error = refusal(capsys, config, "--gpus", "2")
    assert "GiB are missing on each GPU" in error
    (n_gb,) = re.findall(r"; 2 GPUs of (\d+) GB would hold it", error)
    assert "--quantization fp8 makes the weights" in error
    assert planned(tmp_path, config, "--gpus", "2", "--gpu-memory", f"{n_gb}GB")["pools"][0]["n_pages"] > 0
    assert "2 of these GPUs hold it (--gpus 2)" in refusal(capsys, config, "--quantization", "fp8")
    assert planned(tmp_path, config, "--gpus", "2", "--quantization", "fp8")["pools"][0]["n_pages"] > 0
