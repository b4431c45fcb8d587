"""Tests of the flags that only ``radixkv serve`` has."""

import pytest

from radixkv.cli.serve import add as add_serve
from radixkv.cli.serve import server_config
from radixkv.settings.arguments import engine_config
from radixkv.settings.config import EngineConfig, ModelConfig
from radixkv.settings.server_config import ServerConfig
from support.flags import command, refused


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
        *("--tool-call-parser", "qwen25", "--reasoning-parser", "none", "--enable-auto-tool-choice"),
        "--keep-nonces",
    )
    assert args.positional_model == "some/model"
    assert args.seed == 7
    assert server_config(args) == ServerConfig(
        host="localhost",
        port=0,
        served_model_name="name",
        heartbeat_timeout_s=2.5,
        max_body_bytes=1000,
        api_key="sesame",
        chat_template="a.jinja",
        metrics_compat="vllm",
        stats_interval_s=0.5,
        explain_contents=False,
        allowed_origins=("https://app.example", "http://localhost:3000"),
        priority_range=(-1, 2),
        tool_call_parser="qwen25",
        reasoning_parser="none",
        keep_nonces=True,
    )
    assert engine_config(args, model="some/model", seed=7) == EngineConfig(ModelConfig("some/model"), seed=7)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("", "may_explain_contents", True),
        ("--no-explain-contents", "may_explain_contents", False),
        ("--api-key k", "may_explain_contents", False),
        ("--api-key k --host 0.0.0.0", "may_explain_contents", False),
        ("--api-key k --explain-contents", "may_explain_contents", True),
        ("", "keep_nonces", False),
        ("", "return_tokens_as_token_ids", False),
        ("--return-tokens-as-token-ids", "return_tokens_as_token_ids", True),
        ("", "allowed_priorities", (0, 0)),
        ("--priority-range=-5,7", "allowed_priorities", (-5, 7)),
        ("--api-key k", "allowed_priorities", (-(1 << 31), (1 << 31) - 1)),
        ("--api-key k --priority-range 0,3", "allowed_priorities", (0, 3)),
        ('--api-key k --allowed-origins ["*"]', "allowed_origins", ("*",)),
        ("--stats-interval 0", "stats_interval_s", None),
        ("--disable-log-stats", "stats_interval_s", None),
        ("some/model --served-model-name a org/b a", "served_model_names", ("a", "org/b")),
        ("--model some/model --served-model-name a org/b a", "served_model_names", ("a", "org/b")),
        ("", "request_log", None),
        ("--log-requests", "request_log", "-"),
        ("--enable-log-requests", "request_log", "-"),
        ("--request-log a.jsonl", "request_log", "a.jsonl"),
        ("--no-enable-log-requests", "request_log", None),
        ("", "restart_runtime", False),
        ("--restart-runtime some/model", "restart_runtime", True),
        ("", "canary_interval_s", None),
        ("--canary-interval 30", "canary_interval_s", 30.0),
    ],
)
def test_a_flag_sets_its_setting(flags, name, value):
    assert getattr(server_config(command(add_serve, "serve", *flags.split())), name) == value


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
    ("flags", "message"),
    [
        (["--log-requests", "--request-log", "a.jsonl"], "not allowed with"),
        (["--restart-runtime=3"], "--restart-runtime"),
        *[([f"--priority-range={text}"], "priority") for text in ("5", "1,2,3", "a,b", "3,-3", "")],
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


def test_the_model_may_follow_a_name_that_is_joined_to_its_flag():
    args = command(add_serve, "serve", "--served-model-name=name", "some/model")
    assert (args.served_model_name, args.positional_model) == (["name"], "some/model")


def test_the_canary_has_an_interval_and_needs_the_cache(capsys):
    for value in ("0", "-1", "1e400"):
        args = command(add_serve, "serve", "--canary-interval", value)
        assert "canary_interval_s" in refused(capsys, server_config, args)
    for value in ("often", "nan"):
        assert "--canary-interval" in refused(capsys, command, add_serve, "serve", "--canary-interval", value)
    without = command(add_serve, "serve", "--canary-interval", "30", "--no-enable-prefix-caching")
    assert "canary_interval_s needs enable_prefix_caching" in refused(capsys, without.run, without)
    embeds = command(add_serve, "serve", "--canary-interval", "30", "--task", "embed")
    assert "canary_interval_s needs task generate" in refused(capsys, embeds.run, embeds)


NUMBER_FLAGS = (
    "--max-model-len --page-size --kv-cache-memory-bytes --max-total-tokens --gpu-memory-utilization --host-memory "
    "--kv-offloading-size --hicache-size --ghost-capacity --pin-budget --max-num-seqs --max-num-batched-tokens "
    "--max-queued-requests --queue-timeout --target-itl-ms --lpm-window --lpm-max-passes --port --stats-interval "
    "--heartbeat-timeout --canary-interval --max-body-bytes --seed"
).split()


def configs(*flags):
    args = command(add_serve, "serve", *flags)
    return server_config(args), engine_config(args, seed=args.seed)


@pytest.mark.parametrize("flag", NUMBER_FLAGS)
@pytest.mark.parametrize("value", ["-5", "nan", "inf", "-inf", str(1 << 64), "1e300", "9" * 400, "9" * 5000])
def test_an_absurd_number_is_wrong_usage_of_its_flag(flag, value, capsys):
    assert flag.lstrip("-") in refused(capsys, configs, f"{flag}={value}").replace("_", "-")


@pytest.mark.parametrize("value", ["1e30", "9" * 400 + "GiB", "1" * 30, "2048PB", "2000000TiB"])
def test_an_absurd_size_is_wrong_usage_of_its_flag(value, capsys):
    for flags in ((), ("--cache-dir=x",)):
        refused(capsys, configs, *flags, f"--host-memory={value}")
    assert "cache-dir-size" in refused(
        capsys, configs, "--host-memory=1GiB", "--cache-dir=x", f"--cache-dir-size={value}"
    ).replace("_", "-").replace("cache-dir-bytes", "cache-dir-size")
