"""Wrong use of ``radixkv bench`` is one line."""

import pytest

from support.bench_command import SMALL


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--base-url", "URL", "--compare-cache"], 2, "--compare-cache starts servers of its own"),
        (["--base-url", "URL", "--page-size", "32"], 2, "--page-size=32 cannot change the server at --base-url"),
        (["--compare-cache", "--disable-radix-cache"], 2, "leave out --no-enable-prefix-caching"),
        (["--api-key", "secret"], 2, "--api-key is for a running server"),
        (["--base-url", "URL", "--workload", "multiturn", "--num-prompts", "4"], 2, "has no num_prompts"),
        (["--base-url", "localhost:1"], 1, "'localhost:1' is not an address"),
        (["--base-url", "http://127.0.0.1:9"], 1, "does not answer"),
        (["--base-url", "URL", "--workload", "nothing"], 1, "workload 'nothing' is unknown"),
        (["--base-url", "URL", "--num-prompts", "many"], 2, "'many' is not a whole number"),
        (["--base-url", "URL", "--request-rate", "0"], 2, "request_rate 0.0 must be above 0"),
        (["--base-url", "URL", "--seed", "-1"], 2, "seed -1 must be at least 0"),
        (["--base-url", "URL", "--warmup-requests", "-1"], 2, "warmup_requests -1 must be between 0 and 1000000"),
        (
            ["--base-url", "URL", "--warmup-requests", "1000001"],
            2,
            "warmup_requests 1000001 must be between",
        ),
        (["--base-url", "URL", "--model", "\udcff"], 1, r"model '\udcff' is not UTF-8"),
        (["--base-url", "URL", "--num-prompts", "0"], 2, "num_prompts 0 must be between 1 and 1000000"),
        (["--base-url", "URL", "--max-concurrency", "0"], 2, "max_concurrency 0 must be between 1 and 1000000"),
        (["--base-url", "URL", "--request-rate", "nan"], 2, "'nan' is not a number"),
        (["--base-url", "URL", "--goodput", "ttfb:3"], 2, "'ttfb:3' names none of ttft, tpot, e2el"),
        (["--base-url", "URL", "--goodput", "ttft:x"], 2, "'ttft:x' has no limit above 0 ms; write ttft:200"),
        (["--base-url", "URL", "--goodput", "ttft"], 2, "'ttft' has no limit above 0 ms; write ttft:200"),
        (["--base-url", "URL", "--dataset-path", "/nowhere.jsonl"], 1, "cannot read the data set /nowhere.jsonl"),
        (["--base-url", "URL", "--output-file", "/nowhere/lines.jsonl"], 1, "cannot write --output-file"),
        (["--base-url", "URL", "--plot", "/proc/pictures"], 1, "cannot write to --plot /proc/pictures"),
        (["--base-url", "URL", "--plot", "/proc/version"], 1, "--plot /proc/version: it is not a folder"),
        (["--base-url", "URL", "--speed", "2"], 1, "speed 2.0 needs a workload with a clock of its own"),
        (
            ["--base-url", "URL", "--request-timeout", "0"],
            2,
            "request_timeout 0.0 must be above 0 s and at most 1e+06",
        ),
        (["--base-url", "URL", "--request-timeout", "inf"], 2, "request_timeout inf must be above 0 s"),
        (["--base-url", "URL", "--request-timeout", "10m"], 2, "'10m' is not a number"),
        (["--base-url", "URL", "--max-context", "99"], 2, "has no max_context"),
        (["--base-url", "URL", "--workload", "trace", "--too-long", "cut"], 2, "invalid choice: 'cut'"),
        (
            ["--base-url", "URL", "--workload", "trace", "--block-len", "513"],
            2,
            "block_len 513 must be at most 512",
        ),
        (["--base-url", "URL", "--speed", "0"], 2, "speed 0.0 must be above 0"),
        (["--base-url", "URL", "--speed", "2", "--request-rate", "3"], 2, "which --request-rate replaces"),
        (["--base-url", "URL", "--skip-bad-lines"], 2, "--skip-bad-lines is for a data set"),
        (["--base-url", "URL", "--prompt-form", "tokens"], 2, "needs the --tokenizer of the server"),
        (["--base-url", "URL", "--prompt-form", "ids"], 2, "invalid choice: 'ids'"),
        (["--base-url", "URL", "--tokenizer", "tiny"], 2, "--tokenizer=tiny cannot change the server"),
        (["--base-url", "URL", "--prompt-form", "tokens", "--tokenizer", "/nowhere"], 1, "tokenizer '/nowhere' is"),
    ],
)
def test_wrong_use_is_one_clear_line(fake, inside, flags, code, message):
    found, output, errors = inside(*(fake.address if flag == "URL" else flag for flag in flags))
    assert (found, output) == (code, "")
    assert message in errors
    assert errors.startswith("radixkv bench: error: ")
    assert errors.count("\n") == 1
    assert fake.bodies == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plot", "x", "compare", "a", "b"], "--plot stands before compare"),
        (["--seed=0", "paging"], "--seed stands before paging"),
        (["--page-size", "32", "paging", "--page-size", "16"], "--page-size stands before paging"),
    ],
)
def test_flags_that_a_command_below_would_not_read_are_refused(inside, flags, said):
    code, output, errors = inside(*flags)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert said in errors


def test_a_server_that_cannot_start_is_one_line(inside):
    code, output, errors = inside("--model", "/nowhere/model")
    assert (code, output) == (1, "")
    assert errors.startswith("radixkv bench: error: the server ended before it was ready: radixkv serve: error: ")
    assert "/nowhere/model" in errors
    assert errors.count("\n") == 1


def test_a_warm_up_that_fails_ends_the_run(fake, inside):
    with_wrong_path = fake.address.replace("http://", "http://user@") + "/other"
    code, output, errors = inside("--base-url", with_wrong_path, "--model", "fake-model", *SMALL)
    assert (code, output) == (1, "")
    assert "warm-up request" in errors
    assert "404" in errors
    assert errors.count("\n") == 1
