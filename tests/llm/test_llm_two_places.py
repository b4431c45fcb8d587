"""Engines with a folder of their own beside a store that they share: where pages come from, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.errors import ConfigError
from radixkv.wire.stats import DiskStats
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


def stats(llm: LLM) -> tuple[DiskStats, DiskStats]:
    metrics = llm.get_metrics()
    assert metrics.disk is not None
    assert metrics.shared_store is not None
    return metrics.disk, metrics.shared_store


@pytest.fixture
def place_of(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Returns the settings of a server with a folder of its own, by the scheme of what it shares with others."""
    (tmp_path / "memory").mkdir()
    urls = {"shm": f"shm://kv?size=64MiB&folder={tmp_path}/memory", "file": f"file://{tmp_path}/shared"}

    def settings(scheme: str, number: int = 0) -> dict[str, Any]:
        return {
            "host_memory_bytes": "16MiB",
            "load_policy": "always",
            "cache_dir": tmp_path / f"own{number}",
            "cache_url": urls[scheme],
        }

    return settings


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", "file"),
        pytest.param("gemma3", "shm", marks=pytest.mark.nightly),
        pytest.param("qwen3.5", "file", marks=pytest.mark.nightly),
        pytest.param("qwen3.5", "shm", marks=pytest.mark.nightly),
    ],
)
def test_restarts_with_one_place_or_both(
    tmp_path: Path, name: str, scheme: str, place_of: Callable[..., dict[str, Any]]
) -> None:
    """The engine comes back; then another one comes, which comes back when nothing is shared any more."""
    save_checkpoint(model := tmp_path / "model", **MODELS[name])
    with opened(model, enable_prefix_caching=False) as llm:
        expected = [one.outputs for one in answers(llm)]
    with opened(model, **place_of(scheme)) as llm:
        assert [one.outputs for one in answers(llm)] == expected
    with opened(model, **place_of(scheme)) as llm:
        again = answers(llm)
        assert [one.outputs for one in again] == expected
        assert again[0].num_fetched_tokens == 384
        disk, shared = stats(llm)
        assert disk.pages_fetched_total > 0
        assert shared.pages_fetched_total == 0, "the disk has it"
    with opened(model, **place_of(scheme, 1)) as llm:
        others = answers(llm)
        assert [one.outputs for one in others] == expected
        assert others[0].num_fetched_tokens == 384
        disk, shared = stats(llm)
        assert (disk.pages_fetched_total, disk.pages_lost_total) == (0, 0)
        assert shared.pages_fetched_total > 0
    shutil.rmtree(tmp_path / "memory" if scheme == "shm" else tmp_path / "shared")
    (tmp_path / "memory").mkdir(exist_ok=True)
    with opened(model, **place_of(scheme, 1)) as llm:  # has written to its folder what the other one had computed
        alone = answers(llm)
        assert [one.outputs for one in alone] == expected
        assert alone[0].num_fetched_tokens == 384
        assert stats(llm)[0].pages_fetched_total > 0


@pytest.mark.nightly
def test_a_folder_that_vanishes_while_the_server_runs(
    tmp_path: Path, place_of: Callable[..., dict[str, Any]]
) -> None:
    save_checkpoint(model := tmp_path / "model")
    with opened(model, enable_prefix_caching=False) as llm:
        expected = [one.outputs for one in answers(llm)]
    for folder in ("shared", "own0"):
        with opened(model, **place_of("file")) as llm:
            answers(llm)
        with opened(model, **place_of("file")) as llm:
            for one in (tmp_path / folder).glob("??/*"):
                one.unlink()
            again = answers(llm)
            assert [one.outputs for one in again] == expected
            assert again[0].num_fetched_tokens == 384
            disk, shared = stats(llm)
            assert (disk.pages_fetched_total > 0, shared.pages_fetched_total > 0) == (
                folder == "shared",
                folder == "own0",
            )


@pytest.mark.parametrize(("own", "shared"), [("kv", "kv"), ("kv/own", "kv"), ("kv", "kv/shared"), ("link", "kv")])
def test_folders_that_are_not_apart_are_refused(tmp_path: Path, own: str, shared: str) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    with pytest.raises(ConfigError, match=r"cache_dir .* and cache_url .* are .*; .* give two folders apart"):
        LLM(host_memory_bytes=1 << 20, cache_dir=tmp_path / own, cache_url=f"file://{tmp_path / shared}")
    assert list((tmp_path / "kv").iterdir()) == []
