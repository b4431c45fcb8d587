"""One trial: compiles a specification within limits of time and memory, and follows a short answer through it."""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
import time
from typing import NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.errors import InvalidRequest
from radixkv.processes.process_limits import limit_memory
from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.matcher import Grammar, MaskFiller
from radixkv.runtime.structured.messages import TrialLimits, TrialResult
from radixkv.runtime.structured.refusals import refusal
from radixkv.runtime.structured.source import Source, prepare_source
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.wire.structured_outputs import StructuredOutputs

MAX_PROBED_TOKENS = 32
"""Length of the answer that is followed."""
N_TIMED = 4
"""Number of tokens at the end of that answer whose times count."""
MAX_TOKEN_S = 0.01
"""Longest processor time of a token there. A slower grammar would delay all other requests; others take less than
1 ms."""
STACK_BYTES = 1 << 20
"""Stack of a trial. A thread of the runtime has more, so that what nests too deep for it fails here."""


def run_trial(
    spec: StructuredOutputs, compiler: Compiler, limits: TrialLimits, deadline_s: float, writer: int
) -> NoReturn:
    """Writes a ``TrialResult`` to a descriptor and ends this process; the kernel ends it at the deadline."""
    code = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        # The runtime must see at once when the process that was forked ends.
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)
        limit_memory(limits.memory_bytes)
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        try:
            result = TrialResult(0, source=_try(spec, compiler, limits))
        except InvalidRequest as error:
            result = TrialResult(0, refusal=str(error))
        except (MemoryError, RecursionError):
            raise  # the specification's fault
        except Exception as error:
            result = TrialResult(0, failure=f"{type(error).__name__}: {error}")
        with open(writer, "wb", closefd=False) as pipe:
            pipe.write(msgspec.json.encode(result))
        code = 0
    finally:
        os._exit(code)  # without the handlers of the process that this one is a copy of


def _try(spec: StructuredOutputs, compiler: Compiler, limits: TrialLimits) -> Source:
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)  # xgrammar writes to standard error what it ignores
        source = prepare_source(spec)
        if source.before:  # which the random answer would not leave
            after = msgspec.structs.replace(source, before="")
            follow(Grammar(compiler.compile(after)), compiler.vocabulary)
        grammar = Grammar(compiler.compile(source))
        log.seek(0)
        warnings = [line for line in log.read().decode(errors="replace").splitlines() if "Warning: " in line]
    if warnings:
        raise refusal("\n".join(warnings))
    if grammar.n_bytes > limits.grammar_bytes:
        raise refusal(
            f"the compiled grammar has {grammar.n_bytes >> 20} MiB, more than {limits.grammar_bytes >> 20}; "
            "make it smaller or simpler"
        )
    follow(grammar, compiler.vocabulary)
    return source


def follow(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Follows a random answer of up to ``MAX_PROBED_TOKENS`` tokens.

    Raises:
        InvalidRequest: filling the masks is slow, or no token may come next.
    """
    choices = random.Random(0)
    matcher, filler = grammar.new_matcher(), MaskFiller(1)
    masks = np.zeros((1, vocabulary.n_mask_words), np.int32)
    times_s: list[float] = []
    while not matcher.has_ended and len(times_s) < MAX_PROBED_TOKENS:
        began = time.process_time()
        filler.fill([matcher], masks)
        fill_s = time.process_time() - began
        token = _choose(masks[0], vocabulary, choices)
        began = time.process_time()
        matcher.accept(token)
        times_s.append(fill_s + time.process_time() - began)
    # The first token of this process is slow for any grammar; answers of fewer tokens delay nobody.
    if len(times_s) >= N_TIMED and min(times_s[-N_TIMED:]) > MAX_TOKEN_S:
        raise refusal("its grammar is too ambiguous: it takes too long to say which tokens may come next")


def _choose(mask: NDArray[np.int32], vocabulary: Vocabulary, choices: random.Random) -> int:
    """Returns an allowed token, one that does not end the answer if there is one.

    Raises:
        InvalidRequest: no token is allowed.
    """
    is_allowed = np.unpackbits(mask.view(np.uint8), count=len(vocabulary.tokens), bitorder="little")
    ends = [token for token in vocabulary.eos_token_ids if is_allowed[token]]
    is_allowed[ends] = 0
    going_on = np.flatnonzero(is_allowed)
    if not len(going_on) and not ends:
        raise refusal("after some answers no token may come next; give every rule a way to end")
    return int(choices.choice(going_on if len(going_on) else ends))
