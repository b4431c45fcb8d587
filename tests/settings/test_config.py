"""Invalid settings and sampling parameters are refused, in short messages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from radixkv.errors import ConfigError, InvalidRequest, shortened
from radixkv.settings.config import MAX_SEED, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.settings.kv_events import KVEventsConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.wire.sampling import SamplingParams


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_addresses_are_valid_hosts(host: str) -> None:
    assert ServerConfig(host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "2001:db8::1"])
def test_addresses_that_other_machines_can_reach_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host '{host}'.*--api-key"):
        ServerConfig(host)
    assert ServerConfig(host, api_key="k").host == host


@pytest.mark.parametrize("key", ["", " ", "two words", "tab\t", "line\n", "schlüssel", "\x7f", "k" * 1025, 5])
def test_a_key_that_no_client_can_send_is_refused_and_not_repeated(key: Any) -> None:
    with pytest.raises(ConfigError, match="api_key .*1024") as caught:
        ServerConfig(api_key=key)
    assert key == "" or key == 5 or not key.strip() or key not in str(caught.value)
    assert ServerConfig(api_key="!~" * 512).api_key == "!~" * 512


def test_repr_does_not_contain_the_key() -> None:
    assert "sesame" not in repr(ServerConfig(api_key="sesame"))


@pytest.mark.parametrize("host", ["localhostt", "", "127.1", "example.org", "http://127.0.0.1"])
def test_the_error_for_an_invalid_address_does_not_mention_keys(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host '{host}' ") as caught:
        ServerConfig(host)
    assert "api-key" not in str(caught.value)


@pytest.mark.parametrize("timeout", [-1.0, 0.0, 0.3, 1.99, float("nan")])
def test_a_heartbeat_timeout_that_a_healthy_runtime_exceeds_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match=f"heartbeat_timeout_s {timeout} .*2"):
        ServerConfig(heartbeat_timeout_s=timeout)
    assert ServerConfig(heartbeat_timeout_s=2.0).heartbeat_timeout_s == 2.0


def test_the_served_name_may_be_left_out_but_not_empty() -> None:
    assert ServerConfig(served_model_name=None).served_model_name is None
    assert ServerConfig().served_model_names == ()
    assert ServerConfig(served_model_name="a").served_model_names == ("a",)
    for empty in ("", ("a", "")):
        with pytest.raises(ConfigError, match="served_model_name is empty"):
            ServerConfig(served_model_name=empty)


@pytest.mark.parametrize("seed", [0, MAX_SEED])
def test_seeds_are_64_bit(seed: int) -> None:
    assert EngineConfig(seed=seed).seed == SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize("seed", [-2, MAX_SEED + 1, 10**27, 10**4000, -(10**9000)], ids=int.bit_length)
def test_other_seeds_are_refused_in_a_short_message(seed: int) -> None:
    for make, error in ((EngineConfig, ConfigError), (SamplingParams, InvalidRequest)):
        with pytest.raises(error, match="seed .* between 0 and 2\\*\\*63 - 1") as caught:
            make(seed=seed)
        assert len(str(caught.value)) < 120


@pytest.mark.parametrize("name", ["max_tokens", "top_k"])
def test_huge_numbers_are_shortened_in_messages(name: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        msgspec.structs.replace(SamplingParams(), **{name: -(10**4000)})
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-5, "-5"),
        (0.3, "0.3"),
        (10**27, str(10**27)),
        (10**50, "100000000000000000000000...000000000000"),
        (-(1 << 40000), "-0x100000000000000000000...000000000000"),
        ("x" * 38, f"'{'x' * 38}'"),
        ("x" * 39, f"'{'x' * 23}...{'x' * 11}'"),
        ("a\nb", "'a\\nb'"),
        ([1 << 20000], "a list with a huge integer"),
    ],
    ids=lambda value: type(value).__name__,  # pytest would write all digits
)
def test_a_value_in_a_message(value: Any, text: str) -> None:
    assert shortened(value) == text
    assert len(text) <= 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheConfig(enable_prefix_caching="no"), "enable_prefix_caching 'no' "),
        (lambda: CacheConfig(page_size=1.5), "page_size 1.5 "),
        (lambda: CacheConfig(page_size=None), "page_size None "),
        (lambda: ModelConfig(model=5), "model is 5"),
        (lambda: ModelConfig(revision=""), "revision is empty"),
        (lambda: ModelConfig(tokenizer=""), "tokenizer is empty"),
        (lambda: ModelConfig(dtype="int8"), "dtype 'int8' .*auto.* float32.* bfloat16.* float16"),
        (lambda: ModelConfig(enforce_eager=1), "enforce_eager 1 "),
        (lambda: ModelConfig(grammar_backend="outlines"), "grammar_backend 'outlines' .*xgrammar or none"),
        (lambda: ModelConfig(attention_backend="fa3"), "attention_backend 'fa3' .*auto, flashinfer or triton"),
        (lambda: ModelConfig(device="cuda:1"), "device 'cuda:1' .*auto.* cpu.* cuda"),
        (lambda: CacheConfig(gpu_memory_utilization=0), "gpu_memory_utilization 0 "),
        (lambda: CacheConfig(gpu_memory_utilization=1.01), "gpu_memory_utilization 1.01 "),
        (lambda: CacheConfig(eviction_policy="lfu"), "eviction_policy 'lfu' .*'lfuda'"),
        (lambda: CacheConfig(pin_budget=-0.1), "pin_budget -0.1 "),
        (lambda: CacheConfig(pin_budget=1.1), "pin_budget 1.1 "),
        (lambda: CacheConfig(kv_cache_memory_bytes=0), "kv_cache_memory_bytes 0 .*1"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs 0 .*1"),
        (lambda: SchedulerConfig(max_num_batched_tokens=0), "max_num_batched_tokens 0 .*1"),
        (lambda: ModelConfig(load_format="pt"), "load_format 'pt' .*auto.* dummy"),
        (lambda: SchedulerConfig(queue_timeout_s=0.0), "queue_timeout_s 0.0 "),
        (lambda: SchedulerConfig(num_reserved_decode_tokens=-1), "num_reserved_decode_tokens -1 .*0"),
        (lambda: SchedulerConfig(num_reserved_decode_tokens=0.5), "num_reserved_decode_tokens 0.5 "),
        (lambda: SchedulerConfig(max_reserved_decode_share=1.5), "max_reserved_decode_share 1.5 .*0 and 1"),
        (lambda: EngineConfig(seed=1.0), "seed 1.0 "),
        (lambda: ServerConfig(port=-1), "port -1 .*65535"),
        (lambda: ServerConfig(port=65536), "port 65536 .*65535"),
        (lambda: ServerConfig(5), "host 5 "),
        (lambda: ServerConfig(chat_template=""), "chat_template is empty"),
        (lambda: ServerConfig(metrics_compat="tgi"), "metrics_compat 'tgi' .*vllm.* sglang"),
        (lambda: ServerConfig(stats_interval_s=0), "stats_interval_s 0 "),
        (lambda: ServerConfig(max_body_bytes=0), "max_body_bytes 0 .*1"),
        (lambda: ServerConfig(explain_contents="no"), "explain_contents 'no' "),
        (lambda: ServerConfig(priority_range=5), "priority_range 5 .*lowest.* highest"),
        (lambda: ServerConfig(priority_range=(1, 2, 3)), "priority_range .*1, 2, 3.* pair"),
        (lambda: ServerConfig(priority_range=(1, 5)), "priority_range .*1, 5.* contain 0"),
        (lambda: ServerConfig(priority_range=(5, -5)), "priority_range .*5, -5.* contain 0"),
        (lambda: ServerConfig(priority_range=(0, 1 << 31)), "priority_range .*2147483648.* 2\\*\\*31 - 1"),
        (lambda: ServerConfig(priority_range=("a", 5)), "priority_range 'a' "),
    ],
)
def test_settings_of_a_wrong_type_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_budget_below_one_page_is_refused_whatever_the_device() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens 15 .*16"):
        EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=15))


NUMBERS = [
    (config, field.name)
    for config in (ModelConfig, CacheConfig, SchedulerConfig, KVEventsConfig, EngineConfig, ServerConfig)
    for field in dataclasses.fields(config)
    if {"int", "float"} & set(re.findall(r"\w+", str(field.type))) and "tuple" not in str(field.type)
]
BESIDE: dict[str, dict[str, Any]] = {"cache_dir_bytes": {"cache_dir": "x", "host_memory_bytes": 1 << 20}}


@pytest.mark.parametrize(("config", "name"), NUMBERS, ids=[name for _, name in NUMBERS])
@pytest.mark.parametrize(
    "value",
    [-1, -1e300, float("nan"), float("inf"), -float("inf"), 1 << 63, 1 << 64, 10**40, 10**5000, 1e300, True, "5"],
    ids=lambda value: str(value)[:9] if isinstance(value, float | str | bool) else f"2**{value.bit_length()}",
)
def test_every_number_that_is_absurd_is_refused_by_name(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        config(**{name: value, **BESIDE.get(name, {})})
    assert f"{name} {shortened(value)} " in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["host_memory_bytes", "kv_cache_memory_bytes", "cache_dir_bytes"])
def test_the_largest_size_is_named(name: str) -> None:
    beside = BESIDE.get(name, {})
    CacheConfig(**{**beside, name: 10 << 50})
    with pytest.raises(ConfigError, match=f"{name} .* at most {1 << 60}"):
        CacheConfig(**{**beside, name: (1 << 60) + 1})
