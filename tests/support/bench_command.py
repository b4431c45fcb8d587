"""Runs ``radixkv bench`` in a separate process."""

import subprocess
import sys

from support.live import LIMIT_S

SMALL = ["--num-prompts", "5", "--num-shots", "2", "--output-len", "3", "--max-concurrency", "1"]
COMMAND = [sys.executable, "-m", "radixkv.cli", "bench"]


def bench(*flags):
    return subprocess.run([*COMMAND, *map(str, flags)], capture_output=True, text=True, timeout=LIMIT_S)
