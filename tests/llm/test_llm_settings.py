"""Tests of ``LLM``'s settings: a flag of ``radixkv serve`` is a keyword with the same meaning, or says why not."""

from __future__ import annotations

import argparse
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli import serve
from radixkv.errors import ConfigError, UnsupportedFeature
from radixkv.llm import LLM
from radixkv.llm import llm as engine
from radixkv.settings.arguments import Parser, engine_config
from radixkv.settings.config import ENGINE_SETTINGS, EngineConfig

VALUES = {
    "admission": "expected",
    "attention_backend": "triton",
    "cache_dir": "folder",
    "cache_dir_bytes": "2GiB",
    "cache_url": "s3://bucket/kv",
    "device": "cpu",
    "dtype": "bfloat16",
    "eviction_policy": "adaptive",
    "ghost_capacity": "2.5",
    "gpu_memory_utilization": "0.5",
    "grammar_backend": "none",
    "host_memory_bytes": "80GiB",
    "kv_budget": "2k",
    "kv_cache_dtype": "fp8",
    "kv_cache_memory_bytes": "4GiB",
    "kv_eviction": "paged",
    "load_format": "dummy",
    "load_policy": "never",
    "lora_modules": "sql=folder",
    "lpm_max_passes": "5",
    "lpm_window": "1k",
    "max_cpu_loras": "3",
    "max_lora_rank": "64",
    "max_loras": "2",
    "max_model_len": "4k",
    "max_num_batched_tokens": "8K",
    "max_num_seqs": "9",
    "max_queued_requests": "1k",
    "max_reserved_decode_share": "0.25",
    "max_total_tokens": "64k",
    "num_reserved_decode_tokens": "1k",
    "state_memory_bytes": "4GiB",
    "model": "tiny",
    "page_size": "8",
    "pin_budget": "0.5",
    "quantization": "fp8",
    "queue_timeout_s": "2.5",
    "revision": "main",
    "schedule_policy": "fcfs",
    "seed": "7",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}',
    "target_itl_ms": "35.5",
    "task": "embed",
    "tensor_parallel_size": "2",
    "tokenizer": "tiny",
    "write_policy": "selective",
}
"""A value of each flag of the engine, by the name under which argparse keeps it."""
BESIDES = {
    "cache_dir": ("host_memory", "1GiB"),
    "cache_dir_bytes": ("host_memory", "1GiB", "cache_dir", "folder"),
    "cache_url": ("host_memory", "1GiB"),
    "enable_lora": ("lora_modules", "sql=folder"),
    "kv_budget": ("kv_eviction", "paged"),
    "kv_eviction": ("kv_budget", "2k"),
}
"""Flags without which a flag is refused."""


def serve_parser() -> Parser:
    parser = Parser(prog="radixkv")
    commands = parser.add_subparsers(parser_class=Parser)
    serve.add(commands, "")
    found = commands.choices["serve"]
    assert isinstance(found, Parser)
    return found


def flags(*, of_server: bool) -> list[tuple[str, argparse.Action]]:
    """Returns the flags that ``--help`` shows, each spelling as a keyword, with their actions."""
    parser = serve_parser()
    of_http = {id(one) for group in parser._action_groups if group.title == "HTTP" for one in group._group_actions}
    return [
        (flag.removeprefix("--").replace("-", "_"), action)
        for action in parser._actions
        if action.help != argparse.SUPPRESS and action.dest != "help" and (id(action) in of_http) is of_server
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--chat-template"
    ]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that returns the configuration of an ``LLM`` with these settings, without a model."""

    class Configured(Exception):
        pass

    def config(**settings: object) -> EngineConfig:
        seen: list[EngineConfig] = []

        class Stop(EngineConfig):
            @classmethod
            def of(cls, values: Any) -> EngineConfig:
                seen.append(EngineConfig.of(values))
                raise Configured

        monkeypatch.setattr(engine, "EngineConfig", Stop)
        with pytest.raises(Configured):
            LLM(**settings)  # type: ignore[arg-type]
        return seen[0]

    return config


@pytest.mark.parametrize(("keyword", "action"), flags(of_server=False), ids=lambda value: str(value)[:40])
def test_a_flag_of_the_engine_is_a_keyword(configured: Any, keyword: str, action: argparse.Action) -> None:
    besides = BESIDES.get(action.dest, ())
    settings: dict[str, object] = dict(zip(besides[::2], besides[1::2], strict=True))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    flag = f"--{keyword.replace('_', '-')}"
    if action.nargs == 0:
        words.append(flag)
        settings[keyword] = True
    else:
        value = "2" if keyword in ("kv_offloading_size", "hicache_size") else VALUES[action.dest]
        words.append(f"{flag}={value}")
        settings[keyword] = float(value) if "." in value else int(value) if value.isdecimal() else value
    args = serve_parser().parse_args(words)
    expected = engine_config(args, seed=args.seed)
    # Offline there is no target unless it is set: nobody waits for the next token.
    defaults = {} if keyword == "target_itl_ms" else {"target_itl_ms": 50.0}
    assert configured(**defaults, **settings) == expected


@pytest.mark.parametrize("keyword", [name for name, _ in flags(of_server=True)])
def test_a_flag_of_the_server_says_that_it_is_one(keyword: str) -> None:
    with pytest.raises((UnsupportedFeature, ConfigError), match=f"{keyword} ?.*") as refused:
        LLM(**{keyword: "secret"})  # type: ignore[arg-type]
    if keyword not in (
        "tool_call_parser",
        "reasoning_parser",
        "disable_log_stats",
        "no_explain_contents",
        "no_learn_pauses",
    ):
        assert "radixkv serve --" in str(refused.value)
    assert keyword != "api_key" or "secret" not in str(refused.value)


@pytest.mark.parametrize("keyword", ["enable_chunked_prefill", "async_scheduling"])
def test_what_is_always_on_may_be_turned_on(configured: Any, keyword: str) -> None:
    assert configured(**{keyword: True}) == configured()


def test_sizes_are_texts_as_of_flags(configured: Any) -> None:
    config = configured(max_model_len="4k", host_memory="80GiB", kv_cache_memory_bytes="2g", max_total_tokens=640)
    assert config.model.max_model_len == 4000
    assert config.cache.host_memory_bytes == 80 << 30
    assert config.cache.kv_cache_memory_bytes == 2 * 10**9
    assert config.cache.max_total_tokens == 640
    assert configured(kv_offloading_size="80GiB").cache.host_memory_bytes == 80 << 30
    assert configured(hicache_size="80").cache.host_memory_bytes == 80 * 10**9
    assert configured(target_itl_ms="off").scheduler.target_itl_ms is None
    assert configured().scheduler.target_itl_ms is None


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"host_memory": "lots"}, ["host_memory 'lots'", "64GiB"]),
        ({"max_model_len": "4x"}, ["max_model_len '4x'", "4k"]),
        ({"context_length": "4x"}, ["context_length '4x'", "4k"]),
        ({"host_memory": "1GiB", "host_memory_bytes": 5}, ["host_memory_bytes and host_memory are the same"]),
        ({"host_memory": 0}, ["host_memory 0 must be at least 1"]),
        ({"queue_timeout": 0}, ["queue_timeout 0 must be"]),
        ({"cache_dir_size": "1GiB"}, ["cache_dir_size 1073741824 needs cache_dir"]),
    ],
)
def test_an_error_has_the_name_and_the_value_as_given(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**settings)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_each_setting_is_a_keyword_with_the_default_of_its_field() -> None:
    keywords = {name: one.default for name, one in signature(LLM).parameters.items() if name != "settings"}
    others = {"chat_template", "reasoning_parser", "show_download"}
    defaults = {name: one.default for name, one in ENGINE_SETTINGS.items()}
    assert keywords == defaults | dict.fromkeys(others) | {"target_itl_ms": None}


def test_folders_may_be_paths(configured: Any) -> None:
    config = configured(model=Path("a"), tokenizer=Path("b"), cache_dir=Path("c"), host_memory=1 << 20)
    assert (config.model.model, config.model.tokenizer, config.cache.cache_dir) == ("a", "b", "c")


def test_a_with_block_frees_the_memory_at_its_end() -> None:
    with LLM("tiny", max_total_tokens=256, grammar_backend="none") as llm:
        assert llm.max_model_len > 0
    with pytest.raises(ConfigError, match="shut down"):
        llm.generate("a")
    with pytest.raises(ZeroDivisionError), LLM("tiny", max_total_tokens=256, grammar_backend="none") as llm:
        _ = 1 // 0
    with pytest.raises(ConfigError, match="shut down"):
        llm.generate("a")
    llm.shutdown()
