"""The process of trials: ``python -m radixkv.runtime.structured.trial_process``, started by ``Trials``.

Nobody knows beforehand how long a specification takes to compile, and how much memory. So each is first compiled in
a process of its own, which the kernel kills at the deadline; the runtime compiles those that pass. This process
imports xgrammar and gets the vocabulary once, and forks for each trial, which takes 20 ms.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
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
    TrialServer(compiler, setup.limits).run()
    return 0


def _send(message: TrialsReady | TrialResult) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


class TrialServer:
    """Forks a process for each request of standard input, and passes its result on."""

    def __init__(self, compiler: Compiler, limits: TrialLimits) -> None:
        self._compiler = compiler
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._received = bytearray()
        self._results: dict[int, bytearray] = {}
        """What each trial has written so far, by the descriptor of its pipe."""

    def run(self) -> None:
        """Serves until standard input ends."""
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    if not (part := os.read(0, 1 << 16)):
                        return
                    self._receive(part)
                elif part := os.read(key.fd, 1 << 16):
                    self._results[key.fd] += part
                else:
                    self._finish(key.fd, *key.data)

    def _receive(self, part: bytes) -> None:
        self._received += part
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            self._fork(msgspec.json.decode(line, type=TrialRequest))

    def _fork(self, request: TrialRequest) -> None:
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            run_trial(request.spec, self._compiler, self._limits, request.deadline_s, writer)
        os.close(writer)
        self._results[reader] = bytearray()
        self._selector.register(reader, selectors.EVENT_READ, (request.id, pid))

    def _finish(self, reader: int, request_id: int, pid: int) -> None:
        self._selector.unregister(reader)
        os.close(reader)
        _, status = os.waitpid(pid, 0)
        written = self._results.pop(reader)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            result = msgspec.json.decode(written, type=TrialResult)
            _send(msgspec.structs.replace(result, id=request_id))
        elif code == -signal.SIGALRM:
            _send(TrialResult(request_id, is_late=True))
        else:
            memory = self._limits.memory_bytes >> 20
            reason = f"compiling it needs more than {memory} MiB of memory or deeper nesting (code {code})"
            _send(TrialResult(request_id, refusal=f"{reason}; make it smaller or simpler"))


if __name__ == "__main__":
    sys.exit(main())
