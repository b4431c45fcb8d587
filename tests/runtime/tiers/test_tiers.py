"""Opening of the memory tiers with settings that are not the usual ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from radixkv import LLM, SamplingParams
from radixkv.errors import ConfigError
from radixkv.runtime import open_loop
from radixkv.runtime.tiers import open as tiers
from radixkv.runtime.tiers.stores import file_store
from support.cases import rest_nightly


@pytest.mark.nightly
@pytest.mark.parametrize(("page_size", "max_model_len"), [(1024, 4096), (48, 200), (64, 40)])
def test_a_disk_tier_with_pages_of_any_size(tmp_path: Path, page_size: int, max_model_len: int) -> None:
    llm = LLM(
        page_size=page_size,
        max_model_len=max_model_len,
        max_total_tokens=8 * 1024,
        host_memory_bytes=256 << 20,
        cache_dir=str(tmp_path / "cache"),
    )
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    llm.shutdown()


def test_the_time_of_a_computed_token_is_the_device_s() -> None:
    n_tokens = 600
    llm = LLM(max_total_tokens=4096, max_num_batched_tokens=1024, host_memory_bytes=1 << 20)
    llm.generate([list(range(100, 100 + n_tokens))], SamplingParams(max_tokens=1))
    stats = llm.get_metrics()
    assert stats.host.compute_seconds_per_token == pytest.approx(stats.device_busy_seconds / n_tokens)
    llm.shutdown()


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("s3://kv/x", "obstore", "s3"), ("mooncake://127.0.0.1:50051", "mooncake", "mooncake")],
)
def test_a_shared_store_whose_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
) -> None:
    monkeypatch.setattr(tiers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"cache_url '{url}' needs {package}; install radixkv\[{extra}\]"):
        LLM(host_memory_bytes=1 << 20, cache_url=url, max_total_tokens=640)


@pytest.mark.parametrize(
    ("module", "name"),
    rest_nightly(
        [
            (tiers, "root_key"),
            (file_store, "PageIndex"),
            (file_store, "TransferThreads"),
            (tiers, "StorageTier"),
            (tiers, "HostTier"),
            (open_loop, "open_scheduler"),
            (open_loop, "assemble_loop"),
        ],
        kept=(1, 6),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_start_that_fails_leaves_no_tier_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"{name} fails")

    def open_llm() -> LLM:
        return LLM(host_memory_bytes=1 << 20, cache_dir=str(tmp_path / "cache"), max_total_tokens=640)

    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(RuntimeError, match=f"{name} fails"):
            open_llm()
    assert set(threading.enumerate()) == threads
    open_llm().shutdown()  # the folder is not locked any more
    assert set(threading.enumerate()) == threads
