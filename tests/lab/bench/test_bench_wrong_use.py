"""Wrong use of ``radixkv bench`` is a one-line error."""

import pytest

from support.bench_command import SMALL
from support.cases import rest_nightly


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    rest_nightly(
        [
            ("--base-url URL --compare-cache", 2, "--compare-cache "),
            ("--base-url URL --page-size 32", 2, "--page-size=32 "),
            ("--compare-cache --disable-radix-cache", 2, "--disable-radix-cache"),
            ("--compare-cache --plain-requests", 2, "which --plain-requests leaves out"),
            ("--api-key secret", 2, "--api-key and "),
            ("--base-url URL --workload multiturn --num-prompts 4", 2, "has no num_prompts"),
            ("--base-url localhost:1", 1, "'localhost:1'"),
            ("--base-url http://127.0.0.1:9", 1, "http://127.0.0.1:9"),
            ("--base-url URL --workload nothing", 1, "workload 'nothing' "),
            ("--base-url URL --num-prompts many", 2, "'many'"),
            ("--base-url URL --request-rate 0", 2, "request_rate 0.0 "),
            ("--base-url URL --seed -1", 2, "seed -1 "),
            ("--base-url URL --warmup-requests -1", 2, "warmup_requests -1 "),
            ("--base-url URL --warmup-requests 1000001", 2, "warmup_requests 1000001 "),
            ("--base-url URL --model \udcff", 1, r"model '\udcff' "),
            ("--base-url URL --num-prompts 0", 2, "num_prompts 0 "),
            ("--base-url URL --max-concurrency 0", 2, "max_concurrency 0 "),
            ("--base-url URL --request-rate nan", 2, "'nan'"),
            ("--base-url URL --goodput ttfb:3", 2, "'ttfb:3'"),
            ("--base-url URL --goodput ttft:x", 2, "'ttft:x'"),
            ("--base-url URL --goodput ttft", 2, "'ttft'"),
            ("--base-url URL --dataset-path /nowhere.jsonl", 1, "/nowhere.jsonl"),
            ("--base-url URL --output-file /nowhere/lines.jsonl", 1, "--output-file"),
            ("--base-url URL --plot /proc/charts", 1, "--plot /proc/charts"),
            ("--base-url URL --plot /proc/version", 1, "--plot /proc/version"),
            ("--base-url URL --speed 2", 1, "speed 2.0 "),
            ("--base-url URL --request-timeout 0", 2, "request_timeout 0.0 "),
            ("--base-url URL --request-timeout inf", 2, "request_timeout inf "),
            ("--base-url URL --request-timeout 10m", 2, "'10m'"),
            ("--base-url URL --max-context 99", 2, "has no max_context"),
            ("--base-url URL --workload trace --too-long cut", 2, "invalid choice: 'cut'"),
            ("--base-url URL --workload trace --block-len 513", 2, "block_len 513 "),
            ("--base-url URL --speed 0", 2, "speed 0.0 "),
            ("--base-url URL --speed 2 --request-rate 3", 2, "--request-rate"),
            ("--base-url URL --skip-bad-lines", 2, "--skip-bad-lines"),
            ("--base-url URL --prompt-form tokens", 2, "--tokenizer"),
            ("--base-url URL --workload agents --prompt-form tokens --tokenizer tiny", 1, "--prompt-form tokens"),
            ("--base-url URL --prompt-form ids", 2, "invalid choice: 'ids'"),
            ("--base-url URL --tokenizer tiny", 2, "--tokenizer=tiny "),
            ("--base-url URL --prompt-form tokens --tokenizer /nowhere", 1, "tokenizer '/nowhere' "),
            ("--model /nowhere/model", 1, "radixkv serve: error: model '/nowhere/model'"),
        ],
        kept=(
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            9,
            10,
            11,
            12,
            13,
            14,
            15,
            16,
            17,
            18,
            19,
            20,
            21,
            22,
            23,
            24,
            25,
            26,
            27,
            28,
            29,
            30,
            31,
            32,
            33,
            34,
            35,
            36,
            37,
            38,
            39,
        ),
    ),
)
def test_wrong_use_is_a_one_line_error(fake, inside, flags, code, message):
    exit_code, output, errors = inside("--warmup-requests", 0, *flags.replace("URL", fake.address).split())
    assert (exit_code, output) == (code, "")
    assert message in errors
    assert errors.startswith("radixkv bench: error: ")
    assert errors.count("\n") == 1
    assert fake.bodies == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--plot x compare a b", "--plot before compare"),
        ("--seed=0 paging", "--seed before paging"),
        ("--page-size 32 paging --page-size 16", "--page-size before paging"),
    ],
)
def test_flags_before_a_subcommand_are_refused(inside, flags, message):
    code, output, errors = inside(*flags.split())
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert message in errors


def test_a_failed_warm_up_ends_the_run(fake, inside):
    with_wrong_path = fake.address.replace("http://", "http://user@") + "/other"
    code, output, errors = inside("--base-url", with_wrong_path, "--model", "fake-model", *SMALL)
    assert (code, output) == (1, "")
    assert "warm-up request" in errors
    assert "404" in errors
    assert errors.count("\n") == 1
