"""The compiled grammars that are kept for later requests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from radixkv.runtime.structured.compile_jobs import Job

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
        self._grammars: OrderedDict[Job, Grammar] = OrderedDict()
        """The one that was used last at the end."""
        self._n_bytes: Counter[str] = Counter()
        """By sender."""

    def get(self, job: Job) -> Grammar | None:
        """Returns a grammar if it is kept, which is a use. O(length)."""
        if job in self._grammars:
            self._grammars.move_to_end(job)
        return self._grammars.get(job)

    def add(self, job: Job, grammar: Grammar) -> None:
        """Keeps a grammar, and drops others until all have room. O(length), and O(grammars) a dropped one."""
        if (old := self._grammars.pop(job, None)) is not None:
            self._n_bytes[job.sender] -= old.n_bytes
        self._grammars[job] = grammar
        self._n_bytes[job.sender] += grammar.n_bytes
        while self._n_bytes.total() > self._max_bytes:
            largest = max(self._n_bytes, key=self._n_bytes.__getitem__)
            oldest = next(one for one in self._grammars if one.sender == largest)
            self._n_bytes[largest] -= self._grammars.pop(oldest).n_bytes
