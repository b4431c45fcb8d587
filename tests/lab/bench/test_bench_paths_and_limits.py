"""``radixkv bench`` with full disks, odd file names and system limits."""

import asyncio
import os
import subprocess
import sys

import pytest

from radixkv.cli import main
from radixkv.processes.server_process import ServerFailed, running_server
from support.cases import rest_nightly
from support.json_lines import write_lines
from support.live import LIMIT_S, complaints

SMALL = ["--num-prompts", "4", "--num-shots", "1", "--output-len", "2", "--warmup-requests", "0"]


def test_a_result_that_cannot_be_saved_is_printed(fake, capsys):
    assert main(["bench", "--base-url", fake.address, *SMALL, "--output-file", "/dev/full"]) == 1
    output, errors = capsys.readouterr()
    assert "Successful requests:                     4" in output
    assert errors == "radixkv bench: error: cannot write --output-file /dev/full: No space left on device\n"


@pytest.mark.parametrize("below", rest_nightly([[], ["compare"]], kept=(1,)))
def test_a_full_disk_is_a_one_line_error(fake, tmp_path, below, completed):
    _, line = completed(*SMALL)
    path = write_lines(tmp_path / "runs.jsonl", line)
    flags = ["--base-url", fake.address, *SMALL]
    command = [sys.executable, "-m", "radixkv.cli", "bench", *([*below, path, path] if below else flags)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    prog = " ".join(["radixkv bench", *below])
    message = f"{prog}: error: cannot write the output: No space left on device\n"
    assert (done.returncode, complaints(done.stderr)) == (1, message)


def test_the_error_has_the_last_line_of_a_long_server_log(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nhead -c 2000000 /dev/zero | tr '\\0' '\\n'\necho the last word\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    async def start():
        async with running_server([]):
            pass

    with pytest.raises(ServerFailed, match="the server ended before it was ready: the last word"):
        asyncio.run(start())


def test_limits_of_several_goodput_flags_are_combined(completed):
    _, line = completed(*SMALL, "--goodput", "ttft:1e-9", "--goodput", "e2el:1e9", "tpot:1e9")
    assert line["goodput"] == {"ttft": 1e-9, "e2el": 1e9, "tpot": 1e9}
    assert line["request_goodput"] == 0


def test_file_names_may_be_invalid_utf_8(tmp_path, completed):
    dataset = write_lines(tmp_path / os.fsdecode(b"\xff.jsonl"), *[{"question": "q", "answer": "#### 1"}] * 5)
    _, line = completed(*SMALL, "--dataset-path", dataset)
    assert line["dataset"] == "?.jsonl"


def test_an_open_loop_may_exceed_the_soft_limit_of_open_files(fake):
    fake.min_in_flight = 50
    command = f"""
import resource, sys
from radixkv.processes.server_process import ServerFailed, running_server
from radixkv.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.exit(main({["bench", "--base-url", fake.address, *SMALL, "--num-prompts", "60", "--request-rate", "1000"]!r}))
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    assert fake.most_in_flight > 40
