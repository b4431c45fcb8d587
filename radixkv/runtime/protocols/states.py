"""The protocol of the branch ``states``: states of recurrent layers or of windows in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from radixkv.runtime.step.plan import StateFork, StateLoad, StateSave, StepPlan
from radixkv.wire.stats import StateStats, WindowStats

if TYPE_CHECKING:
    from radixkv.runtime.request import Request


class States:
    """The states in the tree, of recurrent layers or of windows: which of them are kept, and what rows go on from.

    This class is the protocol and its default, for a model that needs none. O(1) each.
    """

    block_tokens = 1
    """Chunks of prompts end at multiples of it, where a step has room for so many tokens."""

    def arrived(self, request: Request) -> None:
        """Takes note of a new request in the waiting queue."""

    def left(self, request: Request) -> None:
        """Takes note that a request has ended, mostly before it had a row."""

    def is_awaited(self, request: Request) -> bool:
        """Returns whether a waiting request is to be admitted later, because the next plan or a launched one
        computes a state that it could go on from, or a request that runs is about to."""
        return False

    def plan_row(self, request: Request, start: int, end: int, n_in_tree: int) -> None:
        """Takes note of a row of a prompt in the next plan. Its pages are committed.

        Args:
            request: the row's.
            start: its first position.
            end: the position after its last one.
            n_in_tree: leading tokens whose pages the tree had before.
        """

    def plan_decode(self, requests: Sequence[Request]) -> None:
        """Takes note of requests that have a decode row in the next plan, which is counted as scheduled."""

    def forked(self, parent: Request, fork: Request) -> None:
        """Takes note that a fork, which has a batch slot now, goes on from all that its parent has computed."""

    def take(self, step: int) -> tuple[tuple[StateLoad, ...], tuple[StateSave, ...], tuple[StateFork, ...]]:
        """Returns what the plan of a step, which will be launched, must carry for the rows and forks since the last
        call."""
        return (), (), ()

    def step_done(self, plan: StepPlan, are_right: Sequence[bool]) -> None:
        """Takes note of the results of a step.

        Args:
            plan: of the step.
            are_right: [rows], whether what a row has computed can be used.
        """

    def ended(self, request: Request) -> None:
        """Takes note that a request ends with the result that was taken last. Its computed pages are committed, and
        it still has all of them."""

    def freed(self, request: Request) -> None:
        """Takes note that a request has lost its batch slot and pages, which no launched step uses."""

    def undo(self) -> list[Request]:
        """Takes note that all launched steps have failed; returns forks that have no state because of that."""
        return []

    def stats(self) -> StateStats | None:
        """Returns counters and gauges of recurrent layers; None if there are no such layers."""
        return None

    def window_stats(self) -> WindowStats | None:
        """Returns counters and gauges of window pages; None if there are none."""
        return None
