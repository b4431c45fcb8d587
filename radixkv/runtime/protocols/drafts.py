"""The protocol of the branch ``drafts``: guesses how answers go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from radixkv.runtime.step.plan import StepPlan
from radixkv.wire.messages import DraftUse
from radixkv.wire.stats import DraftStats

if TYPE_CHECKING:
    from radixkv.runtime.request import Request


class Drafts:
    """Guesses how answers go on; steps check the guesses, and sample the same tokens as without them.

    This class is the protocol and its default, which guesses nothing. O(1) each.
    """

    def wants_results(self, *, has_prompts: bool) -> bool:
        """Returns whether the next plan is to wait for the results of all launched steps: only then can its rows
        have drafts.

        Args:
            has_prompts: whether the plan is expected to compute prompts.
        """
        return False

    def draft(self, requests: Sequence[Request], max_drafts: Sequence[int], n_most: int) -> list[bytes]:
        """Returns for each request what may follow its tokens, little-endian int32.

        Args:
            requests: all those that decode in the next step; their last tokens are known.
            max_drafts: [requests], most tokens of each; 0 or less: none.
            n_most: most tokens of all, at least 1.
        """
        return [b""] * len(requests)

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Takes note of how many of a row's drafts were right, the first ones."""

    def step_done(
        self,
        plan: StepPlan,
        requests: Sequence[Request],
        n_most: int,
        *,
        has_waited: bool,
        is_last: bool,
        device_seconds: float,
    ) -> None:
        """Takes note of a step whose tokens are appended.

        Args:
            plan: of the step.
            requests: [rows].
            n_most: most drafts that a plan with these decode rows has room for; 0 or less: none.
            has_waited: whether its plan was made when the results of all steps before it were known.
            is_last: whether no plan after it is launched yet, so that the next one may have drafts.
            device_seconds: its time on the device.
        """

    def ended(self, choices: Sequence[Request]) -> DraftUse | None:
        """Takes note that a request has ended, also one that has failed; returns what became of its drafts, or None
        if there are none in any request."""
        return None

    def stats(self) -> DraftStats | None:
        """Returns counters; None if there are no drafts."""
        return None
