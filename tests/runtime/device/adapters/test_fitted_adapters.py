"""Adapters that change what cannot be changed, or fit another model, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radixkv.checkpoints import resolve
from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.errors import CheckpointError, ConfigError
from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.operations import LoraOperations
from radixkv.runtime.device.adapters.rows import StepRows
from radixkv.runtime.device.adapters.sources import find_adapters, open_adapters
from radixkv.runtime.device.adapters.targets import fitted, target_shapes
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops.cpu.operations import CpuOperations
from radixkv.settings.adapters import LoraModule
from radixkv.settings.config import AdapterConfig
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS
from support.lora import write_adapter

QUERY = "model.layers.0.self_attn.q_proj"


def config_of(folder: Path, name: str) -> DecoderConfig:
    save_checkpoint(folder, **(CHECKPOINTS | HYBRIDS)[name])
    checkpoint = resolve(str(folder))
    return DecoderConfig.parse(checkpoint.config, folder / "config.json")


def adapter(folder: Path, *modules: str, shape: tuple[int, int] = (48, 48), **changes: object) -> AdapterFolder:
    write_adapter(folder, dict.fromkeys(modules, shape), seed=1, **changes)
    return AdapterFolder.open(folder, max_rank=16)


@pytest.mark.parametrize(
    ("name", "module", "text"),
    [
        ("grouped", "lm_head", "changes lm_head, and the embedding and the output head have no adapters"),
        ("mixtral", "model.layers.1.mlp.gate", "experts and their routers have no adapters"),
        ("mixtral", "model.layers.1.mlp.experts.3.w1", "experts and their routers have no adapters"),
        ("qwen3-moe", "model.layers.0.mlp.experts.0.up_proj", "experts and their routers have no adapters"),
        ("qwen3.5-attention", "model.layers.0.mlp.shared_expert.up_proj", "experts and their routers"),
        ("qwen3.5", "model.layers.0.linear_attn.out_proj", "recurrent layers have no adapters"),
        ("nemotron-h", "model.layers.0.mixer.in_proj", "recurrent layers have no adapters"),
        ("grouped", "model.layers.0.self_attn.other", "does not fit the served model"),
        ("grouped", "model.layers.9.self_attn.q_proj", "does not fit the served model"),
        ("qwen3-moe", "model.layers.0.mlp.up_proj", "does not fit the served model"),
    ],
)
def test_other_modules_are_refused_by_name(name: str, module: str, text: str, tmp_path: Path) -> None:
    config = config_of(tmp_path / "base", name)
    with pytest.raises(CheckpointError, match=text):
        fitted(adapter(tmp_path / "adapter", module), config)


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path / "base", "grouped")
    with pytest.raises(CheckpointError, match="has 48 inputs and 48 outputs"):
        fitted(adapter(tmp_path / "adapter", QUERY), config)
    assert QUERY in fitted(adapter(tmp_path / "fits", QUERY, shape=(64, 48)), config).modules


def test_attention_of_a_mixture_and_its_plain_mlps_are_targets(tmp_path: Path) -> None:
    """The second layer of this one has no experts."""
    targets = target_shapes(config_of(tmp_path / "base", "qwen3-moe"))
    ends = sorted({name.partition("layers.")[2] for name in targets if not name.endswith(("k_proj", "v_proj"))})
    assert ends == [
        *("0.self_attn.o_proj", "0.self_attn.q_proj"),
        *("1.mlp.down_proj", "1.mlp.gate_proj", "1.mlp.up_proj", "1.self_attn.o_proj", "1.self_attn.q_proj"),
        *("2.self_attn.o_proj", "2.self_attn.q_proj"),
    ]


def test_invocation_tokens_are_of_the_vocabulary(tmp_path: Path) -> None:
    config = config_of(tmp_path / "base", "grouped")
    settings = AdapterConfig(lora_modules=(LoraModule("a", str(tmp_path / "a")),))
    adapter(tmp_path / "a", QUERY, shape=(64, 48), alora_invocation_tokens=[5, config.vocab_size - 1])
    (source,) = find_adapters(settings, config, n_ranks=1, task="generate")
    assert source.invocation_tokens == (5, config.vocab_size - 1)
    adapter(tmp_path / "a", QUERY, shape=(64, 48), alora_invocation_tokens=[5, config.vocab_size])
    with pytest.raises(CheckpointError, match=f"'a': .*alora_invocation_tokens has the id {config.vocab_size}"):
        find_adapters(settings, config, n_ranks=1, task="generate")


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path / "base", "grouped")
    settings = AdapterConfig(lora_modules=(LoraModule("a", "/nowhere"),))
    with pytest.raises(ConfigError, match="only generate .* task embed"):
        find_adapters(settings, config, n_ranks=1, task="embed")
    assert find_adapters(AdapterConfig(), config, n_ranks=2, task="embed") == ()


def test_files_that_change_during_the_start_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path / "base", "grouped")
    write_adapter(tmp_path / "a", {QUERY: (64, 48)}, seed=1)
    settings = AdapterConfig(
        lora_modules=(LoraModule("a", str(tmp_path / "a")), LoraModule("b", str(tmp_path / "a")))
    )
    found = find_adapters(settings, config, n_ranks=1, task="generate")
    base = BaseModel.of(config)
    assert len({one.digest for one in found}) == len(open_adapters(found, base)) == 1
    write_adapter(tmp_path / "a", {QUERY: (64, 48)}, seed=2)
    with pytest.raises(CheckpointError, match="adapter 'a': .* have changed while the engine started"):
        open_adapters(found, base)


def test_a_module_without_a_product_is_found(tmp_path: Path) -> None:
    config = config_of(tmp_path / "base", "grouped")
    one = BaseModel.of(config).matrices(adapter(tmp_path / "a", QUERY, shape=(64, 48)))
    operations = LoraOperations(CpuOperations(config, 64), target_shapes(config), torch.float32, StepRows())
    with pytest.raises(CheckpointError, match=f"nothing computes with its module {QUERY}"):
        operations.pairs(one)
