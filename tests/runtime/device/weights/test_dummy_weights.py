"""``load_format="dummy"`` needs only a config."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError, ConfigError
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.step.plan import StepPlan
from support.cases import covering
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, GREEDY, random_ids, row_of

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def execute(folder: Path, **settings: Any) -> CpuExecutor:
    base: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "max_total_tokens": None, "load_format": "dummy"}
    return CpuExecutor(
        resolve(str(folder), load_format="dummy"),
        DeviceSettings(
            page_size=8, max_num_seqs=2, max_model_len=256, **(base | settings), max_num_batched_tokens=2048
        ),
    )


def first_token(executor: CpuExecutor) -> int:
    result = (
        executor.launch(StepPlan(0, (row_of(random_ids(50, seed=1), range(7), sampling=GREEDY),)))
        .sample(None)
        .result()
    )
    assert result.finite == (True,)
    return result.tokens[0]


@pytest.mark.parametrize(("name", "dtype"), covering([*CHECKPOINTS], ["float32", "bfloat16"]))
def test_a_config_alone_gives_a_working_model(tmp_path: Path, name: str, dtype: str) -> None:
    save_checkpoint(tmp_path, **CHECKPOINTS[name])
    for path in tmp_path.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert first_token(execute(tmp_path, dtype=dtype)) == first_token(execute(tmp_path, dtype=dtype))


def test_existing_weight_files_are_not_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    execute(tmp_path)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        execute(tmp_path, load_format="auto")


def test_a_config_of_transformers_alone_names_no_architecture(tmp_path: Path) -> None:
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="architectures is None.*LlamaForCausalLM"):
        execute(tmp_path)


def test_a_model_larger_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr("radixkv.runtime.device.memory_check.available_bytes", lambda: 15 << 30)
    with pytest.raises(ConfigError) as caught:
        execute(tmp_path)
    n_bytes = 4 * (8_030_261_248 + 128256 * 4096)
    assert str(caught.value) == (
        f"a model in float32 of {n_bytes} bytes does not fit into memory ({15 << 30} bytes are available); "
        "use a smaller model, or set dtype to bfloat16"
    )
    with pytest.raises(ConfigError, match="model in bfloat16 of .* does not fit"):
        execute(tmp_path, dtype="bfloat16")


def test_a_pool_that_does_not_fit_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr("radixkv.runtime.device.memory_check.available_bytes", lambda: 17 << 30)
    with pytest.raises(ConfigError, match="KV pool of 2148532224 bytes .*model in bfloat16"):
        execute(tmp_path, dtype="bfloat16", kv_cache_memory_bytes=1 << 31)
