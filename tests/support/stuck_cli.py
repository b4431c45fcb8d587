"""``radixkv``'s command line with a start that never ends.

Arguments: where it waits, then those of ``radixkv``. ``tokenizer``: the tokenizer is read without end and holds the
GIL, as the tokenizers package does. ``runtime``: the tokenizer is read, but the runtime never becomes ready.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from itertools import repeat
from pathlib import Path
from typing import Any

from radixkv import cli
from radixkv.frontend.replicas import start
from radixkv.frontend.runtime_process import RuntimeProcess
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import SOCKET_NAME


class SleepingRuntimeProcess(RuntimeProcess):
    @classmethod
    async def start(cls, *args: Any, **kwargs: Any) -> Any:
        return await super().start(*args, **kwargs, command=[sys.executable, "-c", "import time; time.sleep(3600)"])


def never_load(folder: Path) -> Tokenizer:
    while not list(Path(os.environ["TMPDIR"]).glob(f"*/{SOCKET_NAME}")):
        time.sleep(0.01)
    print("waiting", file=sys.stderr, flush=True)
    deque(repeat(0), maxlen=0)  # in C, so that neither other threads nor signal handlers get a turn
    raise AssertionError


def load(folder: Path, load: Any = Tokenizer.load) -> Tokenizer:
    tokenizer = load(folder)
    print("waiting", file=sys.stderr, flush=True)
    return tokenizer


if __name__ == "__main__":
    if sys.argv.pop(1) == "tokenizer":
        Tokenizer.load = staticmethod(never_load)
    else:
        Tokenizer.load = staticmethod(load)
        start.RuntimeProcess = SleepingRuntimeProcess
    sys.exit(cli.main())
