"""Tests of the flags: every alias sets its setting, and a wrong value ends with one line and exit code 2."""

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.arguments import Parser, add_engine_flags, engine_config, engine_flags
from radixkv.cli import main
from radixkv.cli.generate import add as add_generate
from radixkv.cli.offline import sampling_settings
from radixkv.cli.serve import add as add_serve
from radixkv.cli.serve import server_config
from radixkv.compat import Place, refusals
from radixkv.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from radixkv.sampling import SamplingParams


def parse(*flags):
    parser = Parser(prog="radixkv test")
    add_engine_flags(parser)
    parser.set_defaults(parser=parser)
    return engine_config(parser.parse_args(flags))


def command(add, name, *flags):
    parser = Parser(prog="radixkv")
    add(parser.add_subparsers(parser_class=Parser))
    return parser.parse_args([name, *flags])


def refused(capsys, call, *flags):
    with pytest.raises(SystemExit) as stopped:
        call(*flags)
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert ": error: " in text
    assert len(text) < 300
    assert "--help" in text
    return text


def read(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("spellings", "value", "path", "expected"),
    [
        (("--model", "--model-path"), "some/model", "model.model", "some/model"),
        (("--revision",), "main", "model.revision", "main"),
        (("--tokenizer", "--tokenizer-path"), "some/tokenizer", "model.tokenizer", "some/tokenizer"),
        (("--dtype",), "bfloat16", "model.dtype", "bfloat16"),
        (("--load-format",), "dummy", "model.load_format", "dummy"),
        (("--device",), "cpu", "model.device", "cpu"),
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
        (("--max-num-seqs", "--max-running-requests"), "9", "scheduler.max_num_seqs", 9),
        (("--max-num-batched-tokens", "--chunked-prefill-size"), "999", "scheduler.max_num_batched_tokens", 999),
        (("--schedule-policy", "--scheduling-policy"), "fcfs", "scheduler.schedule_policy", "fcfs"),
        (("--max-queued-requests",), "3", "scheduler.max_queued_requests", 3),
        (("--queue-timeout",), "2.5", "scheduler.queue_timeout_s", 2.5),
        (("--lpm-window",), "4", "scheduler.lpm_window", 4),
        (("--lpm-max-passes",), "5", "scheduler.lpm_max_passes", 5),
    ],
)
def test_each_spelling_gives_its_setting_and_changes_no_other(spellings, value, path, expected):
    for spelling in spellings:
        for flags in ([spelling, value], [f"{spelling}={value}"]):
            config = parse(*flags)
            assert read(config, path) == expected
            assert engine_flags(config) == [f"{spellings[0]}={value}"]


@pytest.mark.parametrize(("spelling", "name"), [("half", "float16"), ("float", "float32")])
def test_vllms_other_names_of_types(spelling, name):
    assert parse("--dtype", spelling).model.dtype == name


def test_both_spellings_of_no_cache():
    assert parse().cache.enable_prefix_caching
    assert parse("--enable-prefix-caching").cache.enable_prefix_caching
    assert not parse("--no-enable-prefix-caching").cache.enable_prefix_caching
    assert not parse("--disable-radix-cache").cache.enable_prefix_caching


@pytest.mark.parametrize("flag", ["--max-queued-requests", "--queue-timeout", "--lpm-window", "--lpm-max-passes"])
def test_generate_has_no_queue_flags(capsys, flag):
    assert f"unknown flag {flag}" in refused(capsys, command, add_generate, "generate", "text", flag, "3")
    assert engine_config(command(add_generate, "generate", "text")) == EngineConfig()


def test_both_spellings_of_no_graphs():
    assert not parse().model.enforce_eager
    assert parse("--enforce-eager").model.enforce_eager
    assert parse("--disable-cuda-graph").model.enforce_eager


def test_flags_that_exist_for_one_value_change_nothing():
    one = [flag for name in ("--tensor-parallel-size", "-tp", "--tp-size", "--tp") for flag in (name, "1")]
    auto = [
        flag for name in ("--kv-cache-dtype", "--load-format", "--generation-config") for flag in (name, "auto")
    ]
    assert parse(*one, *auto) == EngineConfig()


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
    ),
    cache=st.builds(
        CacheConfig,
        page_size=st.integers(1, 64),
        kv_cache_memory_bytes=st.none() | positive,
        max_total_tokens=st.none() | positive,
        enable_prefix_caching=st.booleans(),
        gpu_memory_utilization=st.none() | st.floats(1e-3, 1.0),
        write_policy=st.sampled_from(["through", "selective"]),
        load_policy=st.sampled_from(["auto", "always", "never"]),
        eviction_policy=st.sampled_from(["lru", "lfuda", "adaptive"]),
        ghost_capacity=st.floats(0, 1e3),
    )
    | st.builds(
        CacheConfig,
        host_memory_bytes=positive,
        cache_dir=st.sampled_from(["folder", "/folder with space"]),
        cache_dir_bytes=st.none() | positive,
    )
    | st.builds(CacheConfig, host_memory_bytes=positive),
    scheduler=st.builds(
        SchedulerConfig,
        max_num_seqs=st.none() | st.integers(1, 64),
        max_num_batched_tokens=st.none() | st.integers(128, 4096),
        schedule_policy=st.sampled_from(["lpm", "fcfs"]),
        max_queued_requests=positive,
        queue_timeout_s=st.none() | st.floats(1e-3, 1e9),
        lpm_window=positive,
        lpm_max_passes=positive,
    ),
)


@settings(max_examples=150, deadline=None)
@given(engines)
def test_engine_flags_reproduce_the_configuration(config):
    assert parse(*engine_flags(config)) == config


def test_every_setting_has_a_flag():
    """A new field of a configuration must appear in ``engines`` above, and so in ``engine_flags``."""
    assert {field.name for field in fields(EngineConfig)} == {"model", "cache", "scheduler", "seed"}
    assert len(fields(ModelConfig)) == 8
    assert len(fields(CacheConfig)) == 12
    assert len(fields(SchedulerConfig)) == 7
    assert len(fields(ServerConfig)) == 12


def test_serve_reads_its_model_and_server_flags():
    args = command(
        add_serve,
        "serve",
        "some/model",
        *("--host", "localhost", "--port", "0", "--served-model-name", "name", "--seed", "7"),
        *("--heartbeat-timeout", "2.5", "--max-body-bytes", "1000", "--api-key", "sesame"),
        *(
            "--chat-template",
            "a.jinja",
            "--metrics-compat",
            "vllm",
            "--stats-interval",
            "0.5",
            "--no-explain-contents",
        ),
        *("--allowed-origins", '["https://app.example", "http://localhost:3000"]'),
        "--priority-range=-1,2",
    )
    assert args.positional_model == "some/model"
    assert args.seed == 7
    assert server_config(args) == ServerConfig(
        "localhost",
        0,
        "name",
        2.5,
        1000,
        "sesame",
        "a.jinja",
        "vllm",
        0.5,
        False,
        ("https://app.example", "http://localhost:3000"),
        (-1, 2),
    )
    assert engine_config(args, model="some/model", seed=7) == EngineConfig(ModelConfig("some/model"), seed=7)


@pytest.mark.parametrize(
    ("flags", "explains"),
    [
        ((), True),
        (("--no-explain-contents",), False),
        (("--api-key", "k"), False),
        (("--api-key", "k", "--host", "0.0.0.0"), False),
        (("--api-key", "k", "--explain-contents"), True),
    ],
)
def test_only_a_server_without_a_key_explains_contents_by_default(flags, explains):
    assert server_config(command(add_serve, "serve", *flags)).may_explain_contents is explains


@pytest.mark.parametrize("content", ["sesame", "sesame\n", "sesame\r\n"])
def test_the_key_comes_from_a_flag_a_file_or_the_environment(tmp_path, monkeypatch, content):
    file = tmp_path / "key"
    file.write_text(content)
    from_file = command(add_serve, "serve", "--api-key-file", str(file))
    assert server_config(from_file).api_key == "sesame"
    assert server_config(command(add_serve, "serve")).api_key is None
    monkeypatch.setenv("RADIXKV_API_KEY", "from-environment")
    assert server_config(command(add_serve, "serve")).api_key == "from-environment"
    assert server_config(from_file).api_key == "sesame"
    assert server_config(command(add_serve, "serve", "--api-key", "k")).api_key == "k"


def test_an_unusable_key_is_refused_without_showing_it(tmp_path, monkeypatch, capsys):
    def refusal(*flags):
        with pytest.raises(SystemExit, match="2"):
            server_config(command(add_serve, "serve", *flags))
        return capsys.readouterr().err

    file = tmp_path / "key"
    assert "--api-key-file" in refusal("--api-key-file", str(file))
    assert "--api-key-file" in refusal("--api-key-file", str(tmp_path))
    for content in ("", "\n", "open sesame", "sesame\nsesame\n", "ses\xe4me"):
        file.write_text(content)
        error = refusal("--api-key-file", str(file))
        assert "key" in error
        assert "ses" not in error
    assert "not allowed with" in refusal("--api-key", "k", "--api-key-file", str(file))
    monkeypatch.setenv("RADIXKV_API_KEY", "")
    assert "RADIXKV_API_KEY is empty" in refusal()


@pytest.mark.parametrize(
    ("flags", "priorities"),
    [
        ((), (0, 0)),
        (("--priority-range=-5,7",), (-5, 7)),
        (("--api-key", "k"), (-(1 << 31), (1 << 31) - 1)),
        (("--api-key", "k", "--priority-range", "0,3"), (0, 3)),
    ],
)
def test_clients_without_a_key_have_one_priority_by_default(flags, priorities):
    assert server_config(command(add_serve, "serve", *flags)).allowed_priorities == priorities


@pytest.mark.parametrize("text", ["5", "1,2,3", "a,b", "3,-3", ""])
def test_a_priority_range_that_is_none_is_wrong_usage(text, capsys):
    with pytest.raises(SystemExit):
        server_config(command(add_serve, "serve", f"--priority-range={text}"))
    assert "priority" in capsys.readouterr().err


def test_all_origins_may_be_allowed_with_a_key():
    args = command(add_serve, "serve", "--api-key", "k", "--allowed-origins", '["*"]')
    assert server_config(args).allowed_origins == ("*",)


def test_an_interval_of_zero_logs_no_statistics():
    assert server_config(command(add_serve, "serve", "--stats-interval", "0")).stats_interval_s is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "host '0.0.0.0'"),
        (["--host", "example.org", "--api-key", "sesame"], "host 'example.org'"),
        (["--api-key", ""], "api_key "),
        (["--api-key", "open sesame"], "api_key "),
        (["--metrics-compat", "VLLM"], "metrics_compat 'VLLM'"),
        (["--stats-interval", "-1"], "--stats-interval: '-1'"),
        (["--stats-interval", "inf"], "--stats-interval: 'inf'"),
        (["--served-model-name", "a", "b"], "--served-model-name"),
        (["--stats-interval", "never"], "--stats-interval: 'never'"),
        (["--allowed-origins", "https://app.example"], "--allowed-origins: 'https://app.example'"),
        (["--allowed-origins", "[5]"], "--allowed-origins: '[5]'"),
        (["--allowed-origins", '["*"]'], "allowed_origins '*'"),
        (["--allowed-origins", '["https://a.b", "*"]'], "allowed_origins '*'"),
        (["--allowed-origins", '["https://a.b/"]'], "allowed_origins 'https://a.b/'"),
        (["--allowed-origins", '["https://A.b"]'], "allowed_origins 'https://A.b'"),
        (["--allowed-origins", '["null"]'], "allowed_origins 'null'"),
        (["--allowed-origins", '["a.b"]'], "allowed_origins 'a.b'"),
        (["--chat-template", ""], "chat_template is empty"),
    ],
)
def test_wrong_server_flags_are_one_line(capsys, flags, message):
    text = refused(capsys, lambda: server_config(command(add_serve, "serve", *flags)))
    assert message in text
    assert "sesame" not in text


@pytest.mark.parametrize(
    "flag",
    [
        "--enable-metrics",
        "--enable-cache-report",
        "--enable-prompt-tokens-details",
        "--enable-chunked-prefill",
        "--disable-log-requests",
        "--no-enable-log-requests",
    ],
)
def test_flags_without_effect_are_accepted(flag):
    args = command(add_serve, "serve", flag, "some/model")
    assert (args.positional_model, server_config(args), engine_config(args)) == (
        "some/model",
        ServerConfig(),
        EngineConfig(),
    )


def test_vllms_flag_turns_statistics_off():
    assert server_config(command(add_serve, "serve", "--disable-log-stats")).stats_interval_s is None


def test_the_model_may_follow_a_name_that_is_joined_to_its_flag():
    args = command(add_serve, "serve", "--served-model-name=name", "some/model")
    assert (args.served_model_name, args.positional_model) == ("name", "some/model")


def test_help_shows_a_single_served_model_name(capsys):
    with pytest.raises(SystemExit):
        command(add_serve, "serve", "--help")
    text = capsys.readouterr().out
    assert "--served-model-name NAME" in text
    assert "NAME [NAME" not in text


def test_generate_reads_its_sampling_flags():
    flags = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--seed", "11"]
    args = command(add_generate, "generate", "text", *flags, "--stop", "a", "--stop", "b c", "--ignore-eos")
    expected = SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=("a", "b c"), ignore_eos=True
    )
    assert SamplingParams(**sampling_settings(args)) == expected
    assert args.prompt == "text"


REFUSED_FLAGS = [
    name if name.startswith("-") else f"--{name.replace('_', '-')}"
    for name, refusal in refusals(Place.FLAG).items()
    if refusal.implied_by is None
]


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_flag_of_an_unsupported_feature_is_rejected_by_name(capsys, flag):
    for flags in ([flag], [flag, "0.9"], [f"{flag}=0.9"] if flag.startswith("--") else [flag]):
        assert f"{flag} is not supported: " in refused(capsys, parse, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--data-parallel-size 1",
        "--dp-size=1",
        "-dp 1",
        "--pipeline-parallel-size 1",
        "--ep-size 1",
        "--nnodes 1",
        "--tokenizer-mode auto",
        "--log-level info",
        "--task generate",
        "--runner generate",
        "--swap-space 0",
        "--cpu-offload-gb 0",
        "--stream-interval 1",
        "--disaggregation-mode null",
        "--async-scheduling",
    ],
)
def test_neutral_values_of_unsupported_flags_are_accepted(flags):
    args = command(add_serve, "serve", *flags.split(), "some/model")
    assert (args.positional_model, engine_config(args)) == ("some/model", EngineConfig())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep-size", "2"], "--ep-size "),
        (["--stream-interval", "4"], "--stream-interval "),
        (["--task", "embed"], "--task "),
        (["-O3"], "-O "),
        (["--lora-modules", "a=b"], "--lora-modules "),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is not supported: "),
        (["-tp", "2"], "one device"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype "),
        (["--generation-config", "vllm"], "--generation-config "),
        (["--load-format", "gguf"], "load_format 'gguf'"),
        (["--dtype", "fp8"], "dtype 'fp8'"),
        (["--device", "tpu"], "device 'tpu'"),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization 90.0"),
        (["--tokenizer", ""], "tokenizer is empty"),
        (["--queue-timeout", "0"], "queue_timeout_s 0.0"),
        (["--page-size", "many"], "--page-size/--block-size: 'many'"),
        (["--page-size", "0"], "page_size 0 "),
        (["--page-size"], "expected one argument"),
        (["--page-size", "7" * 9000], f"'{'7' * 23}...{'7' * 11}'"),
        (["--page-size", "-" + "7" * 4000], "page_size -0x"),
        (["--dtype", "x" * 4000], f"dtype '{'x' * 23}...{'x' * 11}'"),
        (["--schedule-policy", "random"], "schedule_policy 'random'"),
        (["--max-num-batched-tokens", "4", "--max-num-seqs", "8"], "max_num_batched_tokens 4 "),
        (["--model", ""], "model is ''"),
        (["--page", "8"], "--page"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_it(capsys, flags, message):
    assert message in refused(capsys, parse, *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mem-fraction-static", "5"], ": error: --mem-fraction-static 5.0 "),
        (["--max-running-requests=0"], ": error: --max-running-requests 0 "),
        (
            ["--chunked-prefill-size", "4", "--max-num-seqs", "8"],
            ": error: --chunked-prefill-size 4 ",
        ),
        (["--block-size", "0"], ": error: --block-size 0 "),
        (["--block-size", "many"], ": error: argument --block-size: 'many' "),
        (["--model-path", ""], ": error: --model-path is ''"),
        (["--scheduling-policy=x"], ": error: --scheduling-policy 'x' "),
    ],
)
def test_errors_name_the_alias_that_was_typed(capsys, flags, message):
    assert message in refused(capsys, parse, *flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--page-size", "8", "--block-size=8"], "--page-size and --block-size are"),
        (["--mem-fraction-static", "0.5", "--gpu-memory-utilization", "0.5"], "--mem-fraction-static and --gpu-m"),
    ],
)
def test_a_setting_under_two_names_is_refused(capsys, flags, named):
    assert named in refused(capsys, parse, *flags)


def test_the_last_of_repeated_flags_wins():
    assert parse("--page-size", "8", "--page-size", "4").cache.page_size == 4
    args = command(add_serve, "serve", "--explain-contents", "--no-explain-contents")
    assert server_config(args).explain_contents is False


def test_errors_of_the_engines_start_name_the_alias_that_was_typed(capsys):
    code = main(["generate", "--device", "cpu", "--context-length", "100000", "text"])
    assert code == 1
    assert "radixkv generate: error: --context-length 100000 " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--model", "--model-path"])
def test_a_model_that_is_given_twice_is_refused(capsys, flag):
    args = command(add_serve, "serve", "one", flag, "two")
    text = refused(capsys, lambda: engine_config(args, model=args.positional_model))
    assert "'one'" in text
    assert f" {flag} 'two'" in text


@pytest.mark.parametrize(
    ("flags", "n_bytes"),
    [
        (("--host-memory", "64GiB"), 64 << 30),
        (("--host-memory", "500MB"), 500_000_000),
        (("--host-memory=1.5 gib",), 3 << 29),
        (("--kv-offloading-size", "0.5"), 1 << 29),
        (("--kv-offloading-size", "4", "--kv-offloading-backend", "native"), 4 << 30),
        (("--hicache-size", "2"), 2 * 10**9),
        (("--enable-hierarchical-cache", "--hicache-size=2"), 2 * 10**9),
        (("--host-memory", "1KiB", "--enable-hierarchical-cache"), 1024),
    ],
)
def test_the_host_tiers_size_has_the_unit_of_its_flag(flags, n_bytes):
    assert parse(*flags).cache.host_memory_bytes == n_bytes


@pytest.mark.parametrize(
    ("theirs", "ours"), [("write_through", "through"), ("write_through_selective", "selective")]
)
def test_sglangs_write_policies_have_its_names(theirs, ours):
    assert parse("--hicache-write-policy", theirs).cache.write_policy == ours


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
