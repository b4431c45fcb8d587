"""Tests of the flags of ``radixkv generate``."""

import pytest

from radixkv.cli.generate import add as add_generate
from radixkv.cli.offline import sampling_settings
from radixkv.settings.arguments import engine_config
from radixkv.settings.config import EngineConfig
from radixkv.wire.sampling import SamplingParams
from support.flags import command, refused


@pytest.mark.parametrize("flag", ["--max-queued-requests", "--queue-timeout", "--lpm-window", "--lpm-max-passes"])
def test_generate_has_no_queue_flags(capsys, flag):
    assert f"unknown flag {flag}" in refused(capsys, command, add_generate, "generate", "text", flag, "3")
    assert engine_config(command(add_generate, "generate", "text")) == EngineConfig()


def test_generate_reads_its_sampling_flags():
    flags = ["--max-tokens", "3", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--seed", "11"]
    args = command(add_generate, "generate", "text", *flags, "--stop", "a", "--stop", "b c", "--ignore-eos")
    expected = SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=("a", "b c"), ignore_eos=True
    )
    assert SamplingParams(**sampling_settings(args)) == expected
    assert args.prompt == "text"
