"""Tests of the flags of vLLM and SGLang: those that are understood, and those that are refused by name."""

import re

import pytest

from radixkv.cli import main
from radixkv.cli.serve import add as add_serve
from radixkv.cli.serve import server_config
from radixkv.settings.arguments import engine_config
from radixkv.settings.compat import Place, refusals
from radixkv.settings.config import EngineConfig
from radixkv.settings.server_config import ServerConfig
from support.flags import command, parse, refused


def test_flags_that_exist_for_one_value_change_nothing():
    for name in ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"):
        assert parse(name, "1") == EngineConfig()
    auto = [
        flag for name in ("--kv-cache-dtype", "--load-format", "--generation-config") for flag in (name, "auto")
    ]
    assert parse(*auto) == EngineConfig()


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
        "--nnodes 1 --node-rank 0",
        "--distributed-executor-backend mp",
        "--distributed-executor-backend uni",
        "-dcp 1",
        "--ep 1 --pp 1",
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
    ("flags", "reason"),
    [
        ("--pipeline-parallel-size 2", "divides a model by --tensor-parallel-size alone"),
        ("-pp 2", "divides a model by --tensor-parallel-size alone"),
        ("--pp 2", "use .*--tensor-parallel-size"),
        ("--enable-expert-parallel", "divides a model by --tensor-parallel-size alone"),
        ("-ep", "a part of every expert; use .*--tensor-parallel-size"),
        ("--ep 2", "a part of every expert; use .*--tensor-parallel-size"),
        ("--enable-dp-attention", "some of the heads; use .*--tensor-parallel-size"),
        ("--decode-context-parallel-size 2", "some of the heads; use .*--tensor-parallel-size"),
        ("--nnodes 2", "on one host"),
        ("--node-rank 1", "of one host"),
        ("--distributed-executor-backend ray", "of one host"),
    ],
)
def test_other_ways_to_divide_a_model_are_refused_with_the_one_that_exists(capsys, flags, reason):
    assert re.search(f"{flags.split()[0]} is not supported: .*{reason}", refused(capsys, parse, *flags.split()))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mem-fraction-static", "5"], ": error: --mem-fraction-static 5.0 "),
        (["--max-running-requests=0"], ": error: --max-running-requests 0 "),
        (["--chunked-prefill-size", "4", "--max-num-seqs", "8"], ": error: --chunked-prefill-size 4 "),
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


def test_errors_of_the_engines_start_name_the_alias_that_was_typed(capsys):
    code = main(["generate", "--device", "cpu", "--context-length", "100000", "text"])
    assert code == 1
    assert "radixkv generate: error: --context-length 100000 " in capsys.readouterr().err
