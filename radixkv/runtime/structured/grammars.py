"""The grammars of requests: compiled beside the loop, within limits, and kept for later requests."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import InvalidRequest, RequestError, UnsupportedFeature
from radixkv.runtime.structured.compile_jobs import CompileJobs, Job
from radixkv.runtime.structured.kept_grammars import KeptGrammars
from radixkv.runtime.structured.messages import TrialLimits
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.settings.tenants import OPERATOR
from radixkv.wire.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from radixkv.runtime.structured.matcher import Grammar, MaskFiller, Matcher

DEADLINE_S = 10.0
"""Longest time that a trial may take."""
MEMORY_BYTES = 2 << 30
"""Memory that a trial may take."""
CACHE_BYTES = 256 << 20
"""Size of the compiled grammars that are kept; one of them may have a quarter of it."""
REFUSAL_S = 60.0
"""How long a refusal is kept. A trial takes up to ``DEADLINE_S``, and clients send a refused request again; but a
trial that was too slow may succeed later."""
MAX_REFUSALS = 64
"""Most refusals that are kept, with specifications of up to 256 KiB."""


def refusal_of_all(*, has_tokenizer: bool, has_eos: bool) -> UnsupportedFeature | None:
    """Returns why this engine refuses every specification; None if it does not."""
    if importlib.util.find_spec("xgrammar") is None:
        reason = "needs xgrammar; install radixkv[structured]"
    elif not has_tokenizer:
        reason = "needs a checkpoint with a tokenizer; this one has no tokenizer.json"
    elif not has_eos:
        reason = "needs a checkpoint that names its end-of-sequence token, which this one does not"
    else:
        return None
    return UnsupportedFeature(f"structured_outputs {reason}", param="structured_outputs")


class Grammars:
    """Compiles specifications in the background, and keeps the grammars that were used last, for each sender alone.

    All methods are called by one thread. They return at once, but for ``wait_until_ready`` and ``close``.
    """

    def __init__(
        self,
        read_vocabulary: Callable[[], Vocabulary],
        *,
        n_threads: int,
        deadline_s: float = DEADLINE_S,
        memory_bytes: int = MEMORY_BYTES,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Starts a thread that reads the vocabulary and starts the process of trials; returns at once.

        Args:
            read_vocabulary: called by that thread.
            n_threads: processors for one compilation, and for filling masks.
            deadline_s: longest time that a trial may take.
            memory_bytes: memory that a trial may take.
            cache_bytes: size of the compiled grammars to keep.
        """
        self._limits = TrialLimits(memory_bytes, cache_bytes // 4, n_threads)
        self._kept = KeptGrammars(cache_bytes)
        self._refusals: OrderedDict[Job, tuple[InvalidRequest, float]] = OrderedDict()
        """Kept refusals, the oldest first, with the time of ``monotonic`` until which they are kept."""
        self._n_tickets = 0
        self._waiting: dict[Job, list[int]] = {}
        """Tickets of each job that is being done."""
        self._jobs: dict[int, Job] = {}
        """The job of each of those tickets."""
        self._filler: MaskFiller | None = None
        self._compiling = CompileJobs(read_vocabulary, self._limits, deadline_s)

    def wait_until_ready(self) -> None:
        """Waits until compiling can begin at once, which takes 4 s from the start.

        Raises:
            RadixKVError: the vocabulary could not be read, or the process could not be started.
        """
        self._compiling.wait_until_ready()

    def get(self, spec: StructuredOutputs, sender: str = OPERATOR) -> Grammar | None:
        """Returns the grammar of a sender's specification if it is kept. O(length).

        Raises:
            InvalidRequest: the specification was refused less than ``REFUSAL_S`` ago.
        """
        job = Job(sender, spec)
        if (refusal := self._refusals.get(job)) is not None:
            error, until = refusal
            if monotonic() < until:
                raise InvalidRequest(str(error), param=error.param)
            del self._refusals[job]
        return self._kept.get(job)

    def request(self, spec: StructuredOutputs, sender: str = OPERATOR) -> int:
        """Begins to compile a sender's specification, unless that has begun; returns the ticket for
        ``take_compiled``."""
        self._n_tickets += 1
        job = self._jobs[self._n_tickets] = Job(sender, spec)
        if (tickets := self._waiting.get(job)) is not None:
            tickets.append(self._n_tickets)
        else:
            self._waiting[job] = [self._n_tickets]
            self._compiling.submit(job)
        return self._n_tickets

    def cancel(self, ticket: int) -> None:
        """Forgets a ticket. The grammar is kept when it is compiled, if compiling has begun and is not slow."""
        if (job := self._jobs.pop(ticket, None)) is None:
            return
        self._waiting[job].remove(ticket)
        if not self._waiting[job]:
            del self._waiting[job]
            self._compiling.cancel(job)

    @property
    def is_compiling(self) -> bool:
        """Whether there are tickets that ``take_compiled`` has not returned."""
        return bool(self._jobs)

    def fileno(self) -> int:
        """Returns a descriptor that is readable while ``take_compiled`` may have something to return."""
        return self._compiling.fileno()

    def take_compiled(self) -> list[tuple[int, Grammar | RequestError]]:
        """Returns the tickets that ended since the last call, with their grammars, or why there is none."""
        taken: list[tuple[int, Grammar | RequestError]] = []
        for job, outcome in self._compiling.take():
            if isinstance(outcome, InvalidRequest):
                self._keep_refusal(job, outcome)
            elif not isinstance(outcome, RequestError):
                self._kept.add(job, outcome)
            for ticket in self._waiting.pop(job, ()):
                del self._jobs[ticket]
                taken.append((ticket, outcome))
        if (failure := self._compiling.failure) is not None and self._jobs:
            error = RequestError(f"grammars cannot be compiled: {failure}", param="structured_outputs")
            taken += [(ticket, error) for ticket in self._jobs]
            self._jobs.clear()
            self._waiting.clear()
        return taken

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        """Fills the masks of answers, as ``MaskFiller.fill`` does."""
        if self._filler is None:
            from radixkv.runtime.structured.matcher import MaskFiller  # which imports xgrammar

            self._filler = MaskFiller(self._limits.n_threads)
        self._filler.fill(matchers, masks)

    def close(self) -> None:
        """Ends the process and the thread. Waits for grammars that passed their trials, which takes no longer."""
        self._compiling.close()

    def _keep_refusal(self, job: Job, error: InvalidRequest) -> None:
        self._refusals.pop(job, None)
        self._refusals[job] = error, monotonic() + REFUSAL_S
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)
