"""Exit codes and output of the ``radixkv`` command, some in a process of its own."""

import os
import socket
import subprocess
import sys

import pytest

from radixkv import __version__, cli
from support.cases import rest_nightly
from support.live import LIMIT_S


def radixkv(*flags):
    command = [sys.executable, "-m", "radixkv.cli", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def inside(capsys):
    """Runs a command in this process."""

    def run(*flags):
        arguments = [os.fsdecode(flag) for flag in flags]
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def check_error(done, code, message, command="radixkv"):
    *progress, error = done.stderr.splitlines()
    assert message in error
    assert error.startswith(f"{command}: error: ")
    assert all(line.startswith("radixkv: ") for line in progress)
    assert done.stdout == ""
    assert done.returncode == code


def test_version_and_help():
    assert radixkv("--version").stdout == f"radixkv {__version__}\n"
    package = subprocess.run([sys.executable, "-m", "radixkv", "--version"], capture_output=True, text=True)
    assert package.stdout == f"radixkv {__version__}\n"
    done = radixkv("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("serve", "chat", "generate", "explain", "bench", "examples:"))


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("serve", ["--port", "--host", "--served-model-name", "--page-size", "--block-size", "--schedule-policy"]),
        ("generate", ["--max-tokens", "--temperature", "--top-p", "--top-k", "--stop", "--ignore-eos", "--seed"]),
        ("generate", ["--min-p", "--repetition-penalty", "--min-tokens", "--n", "--dtype", "--load-format"]),
        ("chat", ["--system", "--base-url", "--api-key", "--chat-template", "--max-tokens", "--tokenizer"]),
        ("explain", ["--base-url", "--api-key", "--file", "--cache-salt"]),
        ("bench", ["--workload", "--base-url", "--compare-cache", "--output-file", "--goodput", "--dataset-path"]),
    ],
)
def test_help_of_each_command_names_its_flags_and_none_that_is_refused(inside, command, flags):
    done = inside(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(flag in done.stdout for flag in flags)
    assert "--speculative-algorithm" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "message", "command"),
    [
        ([], "COMMAND", "radixkv"),
        (["fly"], "invalid choice: 'fly'", "radixkv"),
        (["simulate", "--trace", "x"], "--capacity", "radixkv simulate"),
        (["serve", "--speed", "9"], "--speed", "radixkv serve"),
        (["serve", "one", "two"], "unknown arguments: two", "radixkv serve"),
        (["generate", "text", "--api-key", "x"], "--api-key", "radixkv generate"),
        (["serve", "--host", "0.0.0.0"], "host '0.0.0.0'", "radixkv serve"),
        (["serve", "--host", "localhostt"], "host 'localhostt'", "radixkv serve"),
        (["serve", "--served-model-name", ""], "served_model_name is empty", "radixkv serve"),
        (["serve", "--seed", "-5"], "seed -5", "radixkv serve"),
        (["serve", "--heartbeat-timeout", "0.3"], "heartbeat_timeout_s 0.3", "radixkv serve"),
        (["serve", "--port", "70000"], "port 70000", "radixkv serve"),
        (["serve", "--port", "http"], "'http'", "radixkv serve"),
        (["serve", "--heartbeat-timeout", "nan"], "'nan'", "radixkv serve"),
        (["serve", "--heartbeat-timeout", "soon"], "'soon'", "radixkv serve"),
        (["serve", "-pp", "2"], "by --tensor-parallel-size alone", "radixkv serve"),
        (["generate"], "PROMPT", "radixkv generate"),
        (["generate", b"caf\xe9"], "UTF-8", "radixkv generate"),
        (["generate", "text", "--temperature", "-1"], "temperature is -1.0", "radixkv generate"),
        (["generate", "text", "--max-tokens", "0"], "max_tokens is 0", "radixkv generate"),
        (["generate", "text", "-n", "65"], "n is 65", "radixkv generate"),
        (["generate", "text", "--min-p", "2"], "min_p is 2.0", "radixkv generate"),
        (["generate", "text", "--repetition-penalty", "0"], "repetition_penalty is 0.0", "radixkv generate"),
        (["generate", "text", "--max-tokens", "3", "--min-tokens", "4"], "min_tokens is 4", "radixkv generate"),
        (["generate", "text", "--load-format", "gguf"], "load_format 'gguf'", "radixkv generate"),
        (["chat", "--top-p", "0"], "top_p is 0.0", "radixkv chat"),
        (["chat", "--system", b"caf\xe9"], "system prompt", "radixkv chat"),
        (["chat", "tiny", "--api-key", "x"], "--base-url", "radixkv chat"),
        (["chat", "--base-url", "http://a", "--page-size", "8"], "--page-size=8 ", "radixkv chat"),
        (["chat", "--base-url", "http://a", "--chat-template", "f"], "--chat-template ", "radixkv chat"),
        (["chat", "one", "--model", "two"], "model", "radixkv chat"),
        (["chat", "one", "--model-path", "two"], "'one'", "radixkv chat"),
        (["explain", "text", "--file", "f"], "prompt", "radixkv explain"),
        (["explain", ""], "prompt", "radixkv explain"),
        (["explain", b"caf\xe9"], "UTF-8", "radixkv explain"),
        (["generate", "text", "--lpm-window", "3"], "--lpm-window", "radixkv generate"),
        (
            ["generate", "text", "--data-parallel-size", "2"],
            "serve --data-parallel-size",
            "radixkv generate",
        ),
        (
            ["bench", "--max-loras", "2", "--max-cpu-loras", "1"],
            "max_cpu_loras 1 is less than max_loras 2",
            "radixkv bench",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(inside, flags, message, command):
    check_error(inside(*flags), 2, message, command)


def test_wrong_usage_in_a_process_of_its_own():
    check_error(radixkv("fly"), 2, "invalid choice: 'fly'")
    check_error(radixkv("explain", b"caf\xe9"), 2, "UTF-8", "radixkv explain")


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(inside):
    for run, command, flags in (
        (radixkv, "serve", ["--port", "0"]),
        (inside, "generate", ["text"]),
        (inside, "chat", []),
    ):
        done = run(command, *flags, "--model", "/nowhere/model")
        check_error(done, 1, "/nowhere/model", f"radixkv {command}")


def test_a_port_in_use_is_one_line_and_exit_code_1():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check_error(radixkv("serve", "--port", str(port)), 1, f"port {port} on 127.0.0.1", "radixkv serve")


@pytest.mark.parametrize("command", rest_nightly(["serve", "explain", "bench"], kept=(0, 2)))
def test_commands_that_talk_to_processes_do_not_import_torch(command):
    code = f"""
import sys
from radixkv.cli import main
try:
    main([{command!r}, "--help"])
except SystemExit:
    pass
import radixkv.cli.server_client, radixkv.lab.bench.run, radixkv.processes.server_process
import radixkv.lab.bench.report.result_table
if {command!r} == "serve":
    import radixkv.frontend.process
print([name for name in ("torch", "transformers", "rich") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stderr == "[]\n"
