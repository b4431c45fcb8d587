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


def test_known_nonces_are_removed_unless_a_flag_keeps_them():
    assert not server_config(command(add_serve, "serve")).keep_nonces
    assert server_config(command(add_serve, "serve", "--keep-nonces")).keep_nonces


def test_a_flag_of_vllm_names_tokens_by_their_ids():
    assert not server_config(command(add_serve, "serve")).return_tokens_as_token_ids
    assert server_config(command(add_serve, "serve", "--return-tokens-as-token-ids")).return_tokens_as_token_ids


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


def test_the_model_may_follow_a_name_that_is_joined_to_its_flag():
    args = command(add_serve, "serve", "--served-model-name=name", "some/model")
    assert (args.served_model_name, args.positional_model) == (["name"], "some/model")


@pytest.mark.parametrize("model", [["some/model"], ["--model", "some/model"]])
def test_the_model_may_have_several_names(model):
    args = command(add_serve, "serve", *model, "--served-model-name", "a", "org/b", "a")
    assert server_config(args).served_model_names == ("a", "org/b")


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ((), None),
        (("--log-requests",), "-"),
        (("--enable-log-requests",), "-"),
        (("--request-log", "a.jsonl"), "a.jsonl"),
        (("--no-enable-log-requests",), None),
    ],
)
def test_where_lines_of_requests_go(flags, path):
    assert server_config(command(add_serve, "serve", *flags)).request_log == path


def test_two_places_for_lines_of_requests_are_refused(capsys):
    assert "not allowed with" in refused(
        capsys, command, add_serve, "serve", "--log-requests", "--request-log", "a.jsonl"
    )


def test_a_restart_of_the_runtime_must_be_asked_for(capsys):
    assert not server_config(command(add_serve, "serve")).restart_runtime
    assert server_config(command(add_serve, "serve", "--restart-runtime", "some/model")).restart_runtime
    assert "--restart-runtime" in refused(capsys, command, add_serve, "serve", "--restart-runtime=3")


def test_the_canary_has_an_interval_and_needs_the_cache(capsys):
    assert server_config(command(add_serve, "serve")).canary_interval_s is None
    assert server_config(command(add_serve, "serve", "--canary-interval", "30")).canary_interval_s == 30.0
    for value in ("0", "-1", "1e400"):
        args = command(add_serve, "serve", "--canary-interval", value)
        assert "canary_interval_s" in refused(capsys, server_config, args)
    for value in ("often", "nan"):
        assert "--canary-interval" in refused(capsys, command, add_serve, "serve", "--canary-interval", value)
    without = command(add_serve, "serve", "--canary-interval", "30", "--no-enable-prefix-caching")
    assert "canary_interval_s needs enable_prefix_caching" in refused(capsys, without.run, without)


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
