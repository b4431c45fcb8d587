"""The process of trials: ``python -m radixkv.runtime.structured.trial_process``, started by ``Trials``.

Nobody knows beforehand how long a specification takes to compile, and how much memory. So each is first compiled in
a process of its own, which the kernel kills at the deadline; the runtime compiles those that pass. This process
imports xgrammar and gets the vocabulary once, and forks for each trial, which takes 20 ms.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings

import msgspec

from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.messages import TrialLimits, TrialRequest, TrialResult, TrialSetup, TrialsReady
from radixkv.runtime.structured.trial import run_trial


def main() -> int:
    """Runs trials until standard input ends. Returns the exit code."""
    # The runtime ignores SIGTERM, and children inherit that. This process must not: SIGTERM tells it that the
    # runtime has died.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # xgrammar imports torch, which for CUDA starts threads. Forked processes do not use it, and have a deadline.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    if not (line := sys.stdin.buffer.readline()):
        return 0
    setup = msgspec.json.decode(line, type=TrialSetup)
    compiler = Compiler(setup.vocabulary, n_threads=setup.limits.n_threads, cache_bytes=setup.limits.grammar_bytes)
    compiler.warm_up()
    _send(TrialsReady())
    for line in sys.stdin.buffer:
        _fork(msgspec.json.decode(line, type=TrialRequest), compiler, setup.limits)
    return 0


def _send(message: TrialsReady | TrialResult) -> None:
    """Writes a line, in any thread: a write to a buffered file is whole."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _fork(request: TrialRequest, compiler: Compiler, limits: TrialLimits) -> None:
    """Begins a trial. The thread that waits for it makes no use of what the trial's copy of this process uses."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        run_trial(request.spec, compiler, limits, request.deadline_s, writer)
    os.close(writer)
    threading.Thread(target=_finish, args=(request.id, reader, pid, limits), daemon=True).start()


def _finish(request_id: int, reader: int, pid: int, limits: TrialLimits) -> None:
    """Waits for a trial, and passes its result on."""
    with open(reader, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        result = msgspec.json.decode(written, type=TrialResult)
        _send(msgspec.structs.replace(result, id=request_id))
    elif code == -signal.SIGALRM:
        _send(TrialResult(request_id, is_late=True))
    else:
        memory = limits.memory_bytes >> 20
        reason = f"compiling it needs more than {memory} MiB of memory or deeper nesting (code {code})"
        _send(TrialResult(request_id, refusal=f"{reason}; make it smaller or simpler"))


if __name__ == "__main__":
    sys.exit(main())
