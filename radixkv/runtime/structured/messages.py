"""What the runtime and the process of trials say to each other: JSON, one message a line."""

from __future__ import annotations

import msgspec

from radixkv.runtime.structured.source import Source
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.wire.structured_outputs import StructuredOutputs

MAX_LINE_BYTES = 1 << 23
"""Longest line from the process of trials: a source, of which JSON may escape each character."""


class TrialLimits(msgspec.Struct, frozen=True):
    """What one trial may take, beside its time."""

    memory_bytes: int
    """Memory of the trial beyond what its process has before."""
    grammar_bytes: int
    """Largest compiled grammar."""
    n_threads: int


class TrialSetup(msgspec.Struct, frozen=True):
    """The first line to the process. It answers with ``TrialsReady``."""

    vocabulary: Vocabulary
    limits: TrialLimits


class TrialsReady(msgspec.Struct, frozen=True):
    """The process can begin a trial at once."""


class TrialRequest(msgspec.Struct, frozen=True):
    """Asks for a trial, which begins at once, beside those that are under way."""

    id: int
    spec: StructuredOutputs
    deadline_s: float
    """How long it may take."""


class TrialResult(msgspec.Struct, frozen=True):
    """Ends a trial: with the source to compile, or with the reason of a refusal or of a failure."""

    id: int
    source: Source | None = None
    refusal: str = ""
    is_late: bool = False
    """Whether it took longer than its deadline: there is neither a source nor a refusal."""
    failure: str = ""
    """What went wrong in this program, if something did."""
