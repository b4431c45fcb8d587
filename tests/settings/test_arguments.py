"""Tests of the engine's flags: each sets its setting, and a wrong value ends with one line and exit code 2."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cli.generate import add as add_generate
from radixkv.cli.offline import sampling_settings
from radixkv.cli.serve import add as add_serve
from radixkv.cli.serve import server_config
from radixkv.settings.adapters import LoraModule
from radixkv.settings.arguments import engine_config, engine_flags
from radixkv.settings.config import AdapterConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.settings.speculative import SpeculativeConfig
from support.cases import examples
from support.flags import command, parse, read, refused

DRAFTS = (
    '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}'  # as it is written
)


@pytest.mark.parametrize(
    ("spellings", "value", "path", "expected"),
    [
        (("--model", "--model-path"), "some/model", "model.model", "some/model"),
        (("--revision",), "main", "model.revision", "main"),
        (("--tokenizer", "--tokenizer-path"), "some/tokenizer", "model.tokenizer", "some/tokenizer"),
        (("--dtype",), "bfloat16", "model.dtype", "bfloat16"),
        (("--load-format",), "dummy", "model.load_format", "dummy"),
        (("--device",), "cpu", "model.device", "cpu"),
        (("--grammar-backend",), "none", "model.grammar_backend", "none"),
        (("--task",), "embed", "model.task", "embed"),
        (("--attention-backend",), "triton", "model.attention_backend", "triton"),
        (("--max-model-len", "--context-length"), "512", "model.max_model_len", 512),
        (("--page-size", "--block-size"), "8", "cache.page_size", 8),
        (("--kv-cache-memory-bytes",), "4096", "cache.kv_cache_memory_bytes", 4096),
        (("--max-total-tokens",), "640", "cache.max_total_tokens", 640),
        (("--host-memory",), "4096", "cache.host_memory_bytes", 4096),
        (("--write-policy", "--hicache-write-policy"), "selective", "cache.write_policy", "selective"),
        (("--load-policy",), "never", "cache.load_policy", "never"),
        (("--gpu-memory-utilization", "--mem-fraction-static"), "0.85", "cache.gpu_memory_utilization", 0.85),
        (("--eviction-policy", "--radix-eviction-policy"), "adaptive", "cache.eviction_policy", "adaptive"),
        (("--ghost-capacity",), "2.5", "cache.ghost_capacity", 2.5),
        (("--pin-budget",), "0.5", "cache.pin_budget", 0.5),
        (("--max-num-seqs", "--max-running-requests"), "9", "scheduler.max_num_seqs", 9),
        (("--max-num-batched-tokens", "--chunked-prefill-size"), "999", "scheduler.max_num_batched_tokens", 999),
        (("--schedule-policy", "--scheduling-policy"), "fcfs", "scheduler.schedule_policy", "fcfs"),
        (("--admission",), "expected", "scheduler.admission", "expected"),
        (("--num-reserved-decode-tokens",), "0", "scheduler.num_reserved_decode_tokens", 0),
        (("--max-reserved-decode-share",), "0.25", "scheduler.max_reserved_decode_share", 0.25),
        (("--max-queued-requests",), "3", "scheduler.max_queued_requests", 3),
        (("--queue-timeout",), "2.5", "scheduler.queue_timeout_s", 2.5),
        (("--target-itl-ms",), "35.5", "scheduler.target_itl_ms", 35.5),
        (("--target-itl-ms",), "off", "scheduler.target_itl_ms", None),
        (("--lpm-window",), "4", "scheduler.lpm_window", 4),
        (("--lpm-max-passes",), "5", "scheduler.lpm_max_passes", 5),
        (("--speculative-config",), DRAFTS, "scheduler.speculative_config", SpeculativeConfig("ngram", 5, 4, 2)),
    ],
)
def test_each_spelling_gives_its_setting_and_changes_no_other(spellings, value, path, expected):
    for spelling in spellings:
        for flags in ([spelling, value], [f"{spelling}={value}"]):
            config = parse(*flags)
            assert read(config, path) == expected
            assert engine_flags(config) == [f"{spellings[0]}={value}"]


@pytest.mark.parametrize(
    ("flags", "path", "expected"),
    [
        ("--attention-backend FLASHINFER", "model.attention_backend", "flashinfer"),
        ("--attention-backend TRITON_ATTN", "model.attention_backend", "triton"),
        ("--attention-backend flashinfer", "model.attention_backend", "flashinfer"),
        ("--attention-backend auto", "model.attention_backend", "auto"),
        ("", "cache.enable_prefix_caching", True),
        ("--enable-prefix-caching", "cache.enable_prefix_caching", True),
        ("--no-enable-prefix-caching", "cache.enable_prefix_caching", False),
        ("--disable-radix-cache", "cache.enable_prefix_caching", False),
        ("", "model.enforce_eager", False),
        ("--enforce-eager", "model.enforce_eager", True),
        ("--disable-cuda-graph", "model.enforce_eager", True),
        ("--dtype half", "model.dtype", "float16"),
        ("--dtype float", "model.dtype", "float32"),
        ("--hicache-write-policy write_through", "cache.write_policy", "through"),
        ("--hicache-write-policy write_through_selective", "cache.write_policy", "selective"),
        ("--host-memory 64GiB", "cache.host_memory_bytes", 64 << 30),
        ("--host-memory 500MB", "cache.host_memory_bytes", 500_000_000),
        ("--kv-offloading-size 0.5", "cache.host_memory_bytes", 1 << 29),
        ("--kv-offloading-size 4 --kv-offloading-backend native", "cache.host_memory_bytes", 4 << 30),
        ("--hicache-size 2", "cache.host_memory_bytes", 2 * 10**9),
        ("--enable-hierarchical-cache --hicache-size=2", "cache.host_memory_bytes", 2 * 10**9),
        ("--host-memory 1KiB --enable-hierarchical-cache", "cache.host_memory_bytes", 1024),
        ("--enable-lora --lora-modules a=b", "adapters.lora_modules", (LoraModule("a", "b"),)),
        ("--lora-paths a=b /c", "adapters.lora_modules", (LoraModule("a", "b"), LoraModule("/c", "/c"))),
        ('--lora-modules {"name":"a","path":"b=c"}', "adapters.lora_modules", (LoraModule("a", "b=c"),)),
        ('--lora-paths {"lora_name":"a","lora_path":"b"}', "adapters.lora_modules", (LoraModule("a", "b"),)),
        ("--enable-lora", "adapters.enable_lora", True),
        ("--max-loras-per-batch 3", "adapters.max_loras", 3),
        ("--max-loaded-loras 3", "adapters.max_cpu_loras", 3),
    ],
)
def test_values_and_flags_of_other_engines_have_their_meaning(flags, path, expected):
    assert read(parse(*flags.split()), path) == expected


def test_a_size_may_have_a_space():
    assert parse("--host-memory=1.5 gib").cache.host_memory_bytes == 3 << 29


def test_no_flag_at_all_is_the_default():
    assert parse() == EngineConfig()
    assert engine_flags(EngineConfig()) == []
    args = command(add_serve, "serve")
    assert server_config(args) == ServerConfig()
    assert engine_config(args) == EngineConfig()
    assert sampling_settings(command(add_generate, "generate", "text")) == {}


positive = st.integers(1, 10**6)
engines = st.builds(
    EngineConfig,
    model=st.builds(
        ModelConfig,
        model=st.sampled_from(["tiny", "org/name", "-odd", "/folder with space"]),
        revision=st.none() | st.sampled_from(["main", "-x"]),
        dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
        max_model_len=st.none() | positive,
        load_format=st.sampled_from(["auto", "dummy"]),
        tokenizer=st.none() | st.sampled_from(["org/name", "-odd", "/folder with space"]),
        device=st.sampled_from(["auto", "cpu", "cuda"]),
        enforce_eager=st.booleans(),
        quantization=st.none() | st.just("fp8"),
        grammar_backend=st.sampled_from(["xgrammar", "none"]),
        attention_backend=st.sampled_from(["auto", "flashinfer", "triton"]),
    ),
    cache=st.builds(
        CacheConfig,
        page_size=st.integers(1, 64),
        kv_cache_memory_bytes=st.none() | positive,
        max_total_tokens=st.none() | positive,
        enable_prefix_caching=st.booleans(),
        gpu_memory_utilization=st.none() | st.floats(1e-3, 1.0),
        write_policy=st.sampled_from(["through", "selective"]),
        load_ahead=st.booleans(),
        load_policy=st.sampled_from(["auto", "always", "never"]),
        eviction_policy=st.sampled_from(["lru", "lfuda", "adaptive"]),
        ghost_capacity=st.floats(0, 1e3),
        pin_budget=st.floats(0, 1),
        kv_cache_dtype=st.sampled_from(["auto", "fp8", "fp8_e4m3"]),
    )
    | st.builds(
        CacheConfig,
        page_size=st.integers(1, 64),
        kv_eviction=st.just("paged"),
        kv_budget=st.integers(128, 1 << 20),
    )
    | st.builds(
        CacheConfig,
        host_memory_bytes=positive,
        cache_dir=st.sampled_from(["folder", "/folder with space"]),
        cache_dir_bytes=st.none() | positive,
    )
    | st.builds(
        CacheConfig,
        host_memory_bytes=positive,
        cache_url=st.sampled_from(["s3://bucket", "s3://bucket/a/b", "mooncake://[::1]:50051/x", "file:///a/b"]),
    ),
    scheduler=st.builds(
        SchedulerConfig,
        max_num_seqs=st.none() | st.integers(1, 64),
        max_num_batched_tokens=st.none() | st.integers(128, 4096),
        schedule_policy=st.sampled_from(["lpm", "fcfs"]),
        admission=st.sampled_from(["expected", "reserved"]),
        max_queued_requests=positive,
        queue_timeout_s=st.none() | st.floats(1e-3, 1e9),
        target_itl_ms=st.none() | st.floats(1e-3, 1e9),
        lpm_window=positive,
        lpm_max_passes=positive,
        speculative_config=st.none() | st.builds(SpeculativeConfig, num_speculative_tokens=st.integers(1, 32)),
        num_reserved_decode_tokens=st.integers(0, 1 << 30),
        max_reserved_decode_share=st.floats(0, 1),
    ),
    adapters=st.builds(
        AdapterConfig,
        enable_lora=st.booleans(),
        lora_modules=st.just((LoraModule("a", "/b=c"), LoraModule("-d", "folder with space"))),
        max_loras=st.none() | st.integers(2, 5),
        max_lora_rank=st.integers(1, 128),
        max_cpu_loras=st.none() | st.integers(5, 9),
    )
    | st.builds(AdapterConfig),
)


@examples(150)
@given(engines)
def test_engine_flags_reproduce_the_configuration(config):
    assert parse(*engine_flags(config)) == config


def test_every_setting_has_a_flag():
    """A new field of a configuration must appear in ``engines`` above, and so in ``engine_flags``.

    Not events and tenants, which only a server has.
    """
    engine = {"model", "cache", "scheduler", "seed", "kv_events", "adapters", "tenants"}
    assert {field.name for field in fields(EngineConfig)} == engine
    assert len(fields(ModelConfig)) == 13
    assert len(fields(CacheConfig)) == 19
    assert len(fields(SchedulerConfig)) == 12
    assert len(fields(AdapterConfig)) == 5
    assert len(fields(ServerConfig)) == 24


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep-size", "2"], "--ep-size "),
        (["--stream-interval", "4"], "--stream-interval "),
        (["--task", "classify"], "task 'classify' is not supported"),
        (["-O3"], "-O "),
        (["--lora-modules", "a=b", "c=d", "--max-cpu-loras", "1"], "max_cpu_loras 1 is less than the 2 adapters"),
        (["--enable-lora", "--max-lora-rank", "129"], "max_lora_rank 129 must be at most 128"),
        (["--lora-modules", "a=b", "a=d"], "lora_modules has two adapters of the name 'a'"),
        (["--lora-modules", "a="], "lacks a name or a folder"),
        (
            ["--lora-modules", "a\nb=c"],
            "lora_modules has an adapter of the name 'a\\nb'; give it one of at most 256",
        ),
        (["--lora-modules", "a" * 257 + "=c"], "give it one of at most 256 printable characters"),
        (["--lora-modules", '{"name": 1, "path": "b"}'], "is no adapter; give NAME=FOLDER"),
        (["--lora-modules", '{"name": "a"'], "is neither JSON nor NAME=FOLDER"),
        (["--lora-modules", '{"name": "a", "path": "b", "rank": 3}'], "has the unknown field 'rank'"),
        (["--max-lora-rank", "0"], "max_lora_rank 0"),
        (["--kv-eviction", "paged"], "kv_eviction is paged and kv_budget None; set both"),
        (["--kv-budget", "2048"], "kv_eviction is none and kv_budget 2048; set both"),
        (["--kv-eviction", "paged", "--kv-budget", "16"], "kv_budget 16 is less than 2 pages of page_size 16"),
        (["--kv-eviction", "h2o", "--kv-budget", "64"], "kv_eviction 'h2o' is unknown"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size is not supported: "),
        (["-pp", "2"], "by --tensor-parallel-size alone"),
        (["-tp", "two"], "--tensor-parallel-size/--tp-size/--tp/-tp: 'two'"),
        (["--kv-cache-dtype", "fp8_e5m2"], "kv_cache_dtype 'fp8_e5m2'"),
        (["--calculate-kv-scales"], "--calculate-kv-scales is not supported: scales"),
        (["--generation-config", "vllm"], "--generation-config "),
        (["--load-format", "gguf"], "load_format 'gguf'"),
        (["--dtype", "fp8"], "dtype 'fp8'"),
        (["--attention-backend", "fa3"], "'fa3' is not supported; use auto, flashinfer or triton"),
        (["--device", "tpu"], "device 'tpu'"),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization 90.0"),
        (["--tokenizer", ""], "tokenizer is empty"),
        (["--queue-timeout", "0"], "queue_timeout_s 0.0"),
        (["--target-itl-ms", "0"], "target_itl_ms 0.0 must be a number of milliseconds above 0"),
        (["--target-itl-ms", "no"], "'no' is not a number"),
        (["--num-reserved-decode-tokens", "-1"], "num_reserved_decode_tokens -1 must be at least 0"),
        (["--max-reserved-decode-share", "8"], "max_reserved_decode_share 8.0 must be a number between 0 and 1"),
        (["--page-size", "many"], "--page-size/--block-size: 'many'"),
        (["--page-size", "0"], "page_size 0 "),
        (["--page-size"], "expected one argument"),
        (["--page-size", "7" * 9000], f"'{'7' * 23}...{'7' * 11}'"),
        (["--page-size", "-" + "7" * 4000], "page_size -0x"),
        (["--dtype", "x" * 4000], f"dtype '{'x' * 23}...{'x' * 11}'"),
        (["--schedule-policy", "random"], "schedule_policy 'random'"),
        (["--admission", "greedy"], "admission 'greedy'"),
        (["--max-num-batched-tokens", "4", "--max-num-seqs", "8"], "max_num_batched_tokens 4 "),
        (["--model", ""], "model is ''"),
        (["--page", "8"], "--page"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_it(capsys, flags, message):
    assert message in refused(capsys, parse, *flags)


def test_the_last_of_repeated_flags_wins():
    assert parse("--page-size", "8", "--page-size", "4").cache.page_size == 4
    args = command(add_serve, "serve", "--explain-contents", "--no-explain-contents")
    assert server_config(args).explain_contents is False


@pytest.mark.parametrize("flag", ["--model", "--model-path"])
def test_a_model_that_is_given_twice_is_refused(capsys, flag):
    args = command(add_serve, "serve", "one", flag, "two")
    text = refused(capsys, lambda: engine_config(args, model=args.positional_model))
    assert "'one'" in text
    assert f" {flag} 'two'" in text


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--host-memory", "lots"), ["--host-memory", "'lots'", "64GiB"]),
        (("--host-memory", "5XB"), ["'5XB'"]),
        (("--host-memory", "0"), ["host_memory_bytes 0"]),
        (("--hicache-size", "x"), ["--hicache-size", "'x'"]),
        (("--hicache-size", "inf"), ["inf"]),
        (("--hicache-size", "1", "--host-memory", "1GB"), ["--hicache-size", "--host-memory", "same setting"]),
        (("--host-memory", "1GiB", "--no-enable-prefix-caching"), ["host_memory_bytes", "enable_prefix_caching"]),
        (("--host-memory", "1GiB", "--hicache-write-policy", "write_back"), ["--hicache-write-policy", "through"]),
        (("--cache-dir", "/tmp/kv"), ["cache_dir '/tmp/kv'", "--host-memory"]),
        (("--host-memory", "1GiB", "--cache-dir", ""), ["cache_dir is empty"]),
        (("--cache-url", "s3://kv"), ["cache_url 's3://kv'", "--host-memory"]),
        (("--host-memory", "1GiB", "--cache-url", "file:///a/b", "--cache-dir", "/a"), ["'file:///a/b'", "'/a'"]),
        (("--cache-url", "s3://kv", "--cache-dir", "/tmp/kv"), ["cache_dir '/tmp/kv'", "--host-memory"]),
        (("--host-memory", "1GiB", "--cache-url", "redis://kv:1"), ["'redis://kv:1'", "mooncake://"]),
        (("--host-memory", "1GiB", "--cache-url", "/tmp/kv"), ["'/tmp/kv'", "s3://BUCKET/PREFIX"]),
        (("--host-memory", "1GiB", "--cache-url", "s3:///kv"), ["'s3:///kv'"]),
        (("--host-memory", "1GiB", "--cache-url", "file://host/kv"), ["'file://host/kv'", "file:///FOLDER"]),
        (("--host-memory", "1GiB", "--cache-url", "file:///"), ["'file:///'"]),
        (("--host-memory", "1GiB", "--cache-url", "mooncake://host"), ["'mooncake://host'", "HOST:PORT"]),
        (("--host-memory", "1GiB", "--cache-url", "mooncake://host:x"), ["cache_url", "HOST:PORT"]),
        (("--host-memory", "1GiB", "--cache-url", "file:///a%00b"), ["cache_url", "%00"]),
        (("--host-memory", "1GiB", "--cache-url", "file:///a%ffb"), ["cache_url", "no UTF-8"]),
        (("--host-memory", "1GiB", "--cache-url", "s3://kv?region=x"), ["'s3://kv?region=x'"]),
        (("--host-memory", "1GiB", "--cache-url", "shm://kv"), ["'shm://kv'", "shm://NAME?size=SIZE"]),
        (("--host-memory", "1GiB", "--cache-url", "shm://a/b?size=1GiB"), ["'shm://a/b?size=1GiB'"]),
        (("--host-memory", "1GiB", "--cache-url", "shm://..?size=1GiB"), ["'shm://..?size=1GiB'"]),
        (("--host-memory", "1GiB", "--cache-url", "shm://kv?size=big"), ["'shm://kv?size=big'", "'big' is not a"]),
        (("--host-memory", "1GiB", "--cache-url", "shm://kv?size=0"), ["'shm://kv?size=0'", "size 0"]),
        (("--host-memory", "1GiB", "--cache-url", "shm://kv?size=1G&folder=x"), ["is no store"]),
        (
            ("--host-memory", "1GiB", "--cache-url", "shm://kv?folder=/x&size=1G"),
            ["is no store", "or shm://NAME?size=SIZE&folder=FOLDER"],
        ),
        (("--host-memory", "1GiB", "--cache-url", "shm://kv?size=1G&folder=/a%00"), ["%00"]),
        (("--host-memory", "1GiB", "--cache-url", "s3://key:secret@kv"), ["password", "AWS_*"]),
        (("--cache-dir-size", "1GiB"), ["cache_dir_bytes 1073741824", "--cache-dir"]),
        (("--host-memory", "1GiB", "--cache-dir-size", "64GiB"), ["cache_dir_bytes 68719476736", "--cache-dir"]),
        (("--host-memory", "1GiB", "--cache-dir", "/tmp/kv", "--cache-dir-size", "0"), ["cache_dir_bytes 0"]),
        (
            ("--host-memory", "1GiB", "--cache-dir", "/tmp/kv", "--cache-dir-size", "much"),
            ["--cache-dir-size", "'much'"],
        ),
        (("--host-memory", "1GiB", "--load-policy", "fast"), ["load_policy 'fast'", "auto"]),
        (("--enable-hierarchical-cache",), ["--enable-hierarchical-cache", "--host-memory"]),
        (("--hicache-ratio", "2"), ["--hicache-ratio", "--host-memory"]),
        (("--hicache-storage-backend", "file"), ["--hicache-storage-backend", "--cache-dir FOLDER"]),
        (("--swap-space", "4"), ["--swap-space", "--host-memory"]),
        (("--cpu-offload-gb", "4"), ["--cpu-offload-gb", "weights"]),
        (("--kv-offloading-size", "1", "--kv-offloading-backend", "lmcache"), ["--kv-offloading-backend"]),
    ],
)
def test_a_wrong_host_tier_is_one_line(capsys, flags, parts):
    text = refused(capsys, parse, *flags)
    assert all(part in text for part in parts), text
