"""Engines that share memory: what one computes the other goes on from, to the last bit, with states and windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.errors import ConfigError
from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, OTHERS, random_ids

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3.5": HYBRIDS["qwen3.5"],
    "gemma3": {
        **OTHERS["gemma3"],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 48,
    },
}
PROMPTS = [random_ids(390, seed=1), [*random_ids(390, seed=1), *random_ids(60, seed=2)]]


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", max_model_len=512, max_total_tokens=4096, **settings)


def answers(llm: LLM) -> list[RequestOutput]:
    return [llm.generate([{"prompt_token_ids": one}], PARAMS, use_tqdm=False)[0] for one in PROMPTS]


@pytest.mark.parametrize(
    ("name", "n_ranks"),
    [
        ("llama", 1),
        pytest.param("qwen3.5", 1, marks=pytest.mark.nightly),
        pytest.param("gemma3", 1, marks=pytest.mark.nightly),
        pytest.param("llama", 2, marks=pytest.mark.nightly),
    ],
)
def test_an_engine_goes_on_from_what_another_has_computed(tmp_path: Path, name: str, n_ranks: int) -> None:
    save_checkpoint(tmp_path / "model", **MODELS[name])
    (tmp_path / "memory").mkdir()
    shared = {
        "host_memory_bytes": "16MiB",
        "load_policy": "always",
        "cache_url": f"shm://kv?size=64MiB&folder={tmp_path}/memory",
        "tensor_parallel_size": n_ranks,
    }
    with opened(tmp_path / "model", enable_prefix_caching=False, tensor_parallel_size=n_ranks) as llm:
        expected = [one.outputs for one in answers(llm)]
    with opened(tmp_path / "model", **shared) as second:
        with opened(tmp_path / "model", **shared) as first:
            computed = answers(first)
        found = answers(second)  # the end of the first has written what was left
        disk = second.get_metrics().shared_store
    assert [one.outputs for one in computed] == expected
    assert [one.outputs for one in found] == expected
    assert found[0].num_fetched_tokens == 384
    assert disk is not None
    assert disk.pages_lost_total == 0
    assert disk.pages_written_total < 60


@pytest.mark.nightly
def test_models_share_a_segment_if_their_pages_have_the_same_size(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    shared = {
        "host_memory_bytes": "16MiB",
        "load_policy": "always",
        "cache_url": f"shm://kv?size=64MiB&folder={tmp_path}/memory",
    }
    save_checkpoint(tmp_path / "1")
    save_checkpoint(tmp_path / "2", rms_norm_eps=1e-4)
    save_checkpoint(tmp_path / "larger", num_hidden_layers=5)
    with opened(tmp_path / "1", **shared) as one, opened(tmp_path / "2", **shared) as two:
        answers(one)
        assert [output.num_fetched_tokens for output in answers(two)] == [0, 0]
        with pytest.raises(ConfigError, match="it has pages of"):
            opened(tmp_path / "larger", **shared)
    with opened(tmp_path / "1", **shared) as one, opened(tmp_path / "2", **shared) as two:
        assert answers(one)[0].num_fetched_tokens == answers(two)[0].num_fetched_tokens == 384


def test_pages_are_copied_from_the_segment_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is loaded into a slot of the host tier, which is too small for the prompt."""
    save_checkpoint(tmp_path / "model")
    (tmp_path / "memory").mkdir()
    cache_url = f"shm://kv?size=64MiB&folder={tmp_path}/memory"
    with opened(tmp_path / "model", host_memory_bytes="16MiB", load_policy="always", cache_url=cache_url) as first:
        expected = [one.outputs for one in answers(first)]
    monkeypatch.setattr(SharedMemoryStore, "load", lambda *_: pytest.fail("a page takes the way through a slot"))
    small = {"host_memory_bytes": "200KiB", "load_policy": "always", "cache_url": cache_url}
    with opened(tmp_path / "model", **small) as second:
        found = answers(second)
        host = second.get_metrics().host
    assert [one.outputs for one in found] == expected
    assert [one.num_fetched_tokens for one in found] == [384, 64]
    assert host is not None
    assert host.n_slots < 20
