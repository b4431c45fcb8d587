"""The compiled grammars that are kept for later requests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from radixkv.runtime.structured.compile_jobs import Job
from radixkv.wire.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from radixkv.runtime.structured.matcher import Grammar


class KeptGrammars:
    """An LRU cache of grammars for each sender. Where room is missing, the sender with the most bytes
    loses its least recently used one.

    Args:
        max_bytes: size of the grammars of all senders together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: dict[str, OrderedDict[StructuredOutputs, Grammar]] = {}
        """By sender, the one that was used last at the end."""
        self._n_bytes: Counter[str] = Counter()
        """By sender."""

    def get(self, job: Job) -> Grammar | None:
        """Returns a grammar if it is kept, which is a use. O(length)."""
        grammars = self._grammars.get(job.sender)
        if grammars is None or (grammar := grammars.get(job.spec)) is None:
            return None
        grammars.move_to_end(job.spec)
        return grammar

    def add(self, job: Job, grammar: Grammar) -> None:
        """Keeps a grammar, and drops others until all have room. O(length), and O(senders) a dropped one."""
        grammars = self._grammars.setdefault(job.sender, OrderedDict())
        if (old := grammars.pop(job.spec, None)) is not None:
            self._n_bytes[job.sender] -= old.n_bytes
        grammars[job.spec] = grammar
        self._n_bytes[job.sender] += grammar.n_bytes
        while self._n_bytes.total() > self._max_bytes:
            largest = max(self._n_bytes, key=self._n_bytes.__getitem__)
            _, dropped = self._grammars[largest].popitem(last=False)
            self._n_bytes[largest] -= dropped.n_bytes
