"""The settings and the environment of each replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.frontend.replicas.replica_settings import check_cache_folder, engine_of_replica, environment_of_replica
from radixkv.settings.config import CacheConfig, EngineConfig
from radixkv.settings.kv_events import KVEventsConfig


def test_replicas_share_the_memory_and_have_folders_of_their_own() -> None:
    engine = EngineConfig(cache=CacheConfig(host_memory_bytes=1 << 30, cache_dir="/kv", cache_dir_bytes=3 << 30))
    caches = [engine_of_replica(engine, index, 2).cache for index in range(2)]
    assert [cache.host_memory_bytes for cache in caches] == [1 << 29] * 2
    assert [cache.cache_dir_bytes for cache in caches] == [3 << 29] * 2
    assert [cache.cache_dir for cache in caches] == ["/kv/replica-0", "/kv/replica-1"]


def test_what_is_not_shared_stays() -> None:
    engine = EngineConfig(cache=CacheConfig(max_total_tokens=4096))
    assert engine_of_replica(engine, 1, 2) == engine


@pytest.mark.parametrize(
    ("endpoint", "replay_endpoint", "wanted"),
    [
        ("tcp://127.0.0.1:5557", None, ("tcp://127.0.0.1:5559", None)),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6000", ("tcp://127.0.0.1:5559", "tcp://127.0.0.1:6002")),
        ("ipc:///tmp/events", "ipc:///tmp/replays", ("ipc:///tmp/events_dp2", "ipc:///tmp/replays_dp2")),
    ],
)
def test_endpoints_of_events_are_those_that_vllm_gives_its_ranks(
    endpoint: str, replay_endpoint: str | None, wanted: tuple[str, str | None]
) -> None:
    engine = EngineConfig(kv_events=KVEventsConfig(endpoint=endpoint, replay_endpoint=replay_endpoint))
    events = engine_of_replica(engine, 2, 3).kv_events
    assert events is not None
    assert (events.endpoint, events.replay_endpoint) == wanted


@pytest.mark.parametrize(
    ("endpoint", "replay_endpoint", "message"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "at least 2 apart"),
        ("tcp://127.0.0.1:5558", "tcp://[::1]:5557", "at least 2 apart"),
        ("tcp://127.0.0.1:65535", None, "65536"),
    ],
)
def test_endpoints_that_do_not_suffice_are_refused(
    endpoint: str, replay_endpoint: str | None, message: str
) -> None:
    engine = EngineConfig(kv_events=KVEventsConfig(endpoint=endpoint, replay_endpoint=replay_endpoint))
    with pytest.raises(ConfigError, match=message):
        engine_of_replica(engine, 1, 2)


@pytest.mark.parametrize(
    ("visible", "n_ranks", "wanted"),
    [
        (None, 1, ["0", "1"]),
        (None, 2, ["0,1", "2,3"]),
        ("3,5", 1, ["3", "5"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", 2, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        ("0, 1", 1, ["0", "1"]),
        ("", 1, ["", ""]),
    ],
)
def test_each_replica_sees_its_own_gpus(visible: str | None, n_ranks: int, wanted: list[str]) -> None:
    environment = {"PATH": "/bin"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    replicas = [environment_of_replica(environment, index, 2, n_ranks) for index in range(2)]
    assert [replica["CUDA_VISIBLE_DEVICES"] for replica in replicas] == wanted
    assert all(replica["PATH"] == "/bin" for replica in replicas)


def test_a_folder_with_pages_that_no_replica_would_read_is_refused(tmp_path: Path) -> None:
    check_cache_folder(None, 2)
    check_cache_folder(str(tmp_path / "absent"), 2)
    for index in range(2):
        (tmp_path / f"replica-{index}").mkdir()
    (tmp_path / "lost+found").mkdir(mode=0)
    check_cache_folder(str(tmp_path), 2)
    with pytest.raises(ConfigError, match="has 'replica-1', which none of 1 replicas uses"):
        check_cache_folder(str(tmp_path), 1)
    (tmp_path / "lock").touch()
    with pytest.raises(ConfigError, match="has 'lock'"):
        check_cache_folder(str(tmp_path), 3)
