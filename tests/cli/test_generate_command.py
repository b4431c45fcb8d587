"""Tests of ``radixkv generate`` against ``LLM``."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.cli import main
from radixkv.cli.generate import add as add_generate
from radixkv.cli.offline import load_llm, sampling_settings
from radixkv.llm import LLM
from radixkv.settings.arguments import engine_config
from radixkv.settings.config import EngineConfig
from radixkv.wire.sampling import SamplingParams
from support.flags import command, refused

POOL = ["--max-total-tokens", "512", "--max-model-len", "256"]
TEXT = "The rain in Spain"


@pytest.mark.parametrize("flag", ["--max-queued-requests", "--queue-timeout", "--lpm-window", "--lpm-max-passes"])
def test_generate_has_no_queue_flags(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert f"unknown flag {flag}" in refused(capsys, command, add_generate, "generate", "text", flag, "3")
    assert engine_config(command(add_generate, "generate", "text")) == EngineConfig()


def test_generate_reads_its_sampling_flags() -> None:
    flags = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--seed", "11"]
    args = command(add_generate, "generate", "text", *flags, "--stop", "a", "--stop", "b c", "--ignore-eos")
    expected = SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=("a", "b c"), ignore_eos=True
    )
    assert SamplingParams(**sampling_settings(args)) == expected
    assert args.prompt == "text"


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*flags: str) -> str:
        assert main(["generate", TEXT, *flags, *POOL]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


def test_the_flags_are_those_of_sampling_params(generate: Callable[..., str]) -> None:
    flags = ["--seed", "3", "--max-tokens", "9", "--min-tokens", "4", "--top-p", "0.9", "--min-p", "0.02"]
    flags += ["--presence-penalty", "1"]
    shown = generate(*flags, "--frequency-penalty", "0.5", "--repetition-penalty", "1.2", "-n", "2")
    sampling = SamplingParams(
        seed=3,
        max_tokens=9,
        min_tokens=4,
        top_p=0.9,
        min_p=0.02,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        n=2,
    )
    (output,) = LLM("tiny", max_total_tokens=512, max_model_len=256).generate(TEXT, sampling)
    first, second = (answer.text for answer in output.outputs)
    assert shown == f"--- 1 of 2\n{first}\n--- 2 of 2\n{second}\n"


def test_the_checkpoint_has_the_defaults_of_sampling_flags(
    generate: Callable[..., str], sensitive: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sensitive, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 5}))
    shown = generate("--model", str(folder))
    assert shown == generate("--model", str(sensitive), "--temperature", "0", "--max-tokens", "5", "--ignore-eos")
    assert shown != generate("--model", str(folder), "--max-tokens", "4")


@pytest.mark.nightly
def test_flags_for_dtype_tokenizer_and_dummy_weights(
    generate: Callable[..., str], sensitive: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(sensitive / "config.json", folder)
    dummy = ["--model", str(folder), "--load-format", "dummy", "--tokenizer", str(sensitive)]
    whole = ["--model", str(sensitive)]
    greedy = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    assert generate(*dummy, *greedy) == generate(*dummy, *greedy) != generate(*whole, *greedy)
    assert generate(*whole, "--dtype", "bfloat16", *greedy) != ""


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_ctrl_c_while_the_engine_loads_ends_the_process_at_once(name: str) -> None:
    # Imitates extension modules, such as some of torch's, that swallow a KeyboardInterrupt while they load.
    script = f"""
import signal, sys, types

class Engine(types.ModuleType):
    def __getattr__(self, name):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        raise SystemExit("it went on")

sys.modules["radixkv.llm"] = Engine("radixkv.llm")
from radixkv.cli import main
sys.exit(main([{name!r}, {"hi" if name == "generate" else "tiny"!r}]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_pythons_ctrl_c_handler_is_restored_after_loading_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    engine = types.ModuleType("radixkv.llm")
    vars(engine)["LLM"] = lambda **_: seen.append(signal.getsignal(signal.SIGINT))
    monkeypatch.setitem(sys.modules, "radixkv.llm", engine)
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler, during in (
            (signal.default_int_handler, signal.SIG_DFL),
            (signal.SIG_IGN, signal.SIG_IGN),
            (print, print),
        ):
            signal.signal(signal.SIGINT, handler)
            load_llm(EngineConfig())
            assert seen.pop() is during
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat", "tiny"], ["bench"]])
@pytest.mark.parametrize("task", ["embed", "score"])
def test_commands_that_ask_for_answers_refuse_other_tasks_before_a_model_is_loaded(
    command: list[str], task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--task", task])
    assert ended.value.code == 2
    assert f"use radixkv serve --task {task}, or LLM.{task} in Python" in capsys.readouterr().err
