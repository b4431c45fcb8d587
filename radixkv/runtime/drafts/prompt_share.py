"""How often the step behind one with drafts computes prompts."""

from __future__ import annotations

_WEIGHT = 1 / 16
_DRIFT = 1 / 512


class PromptShare:
    """Decayed share of the steps behind those with drafts that compute prompts.

    With drafts answers end sooner and others begin, so that it is more than the share of all steps. It drifts to
    that one while there are no drafts.
    """

    def __init__(self) -> None:
        self.after_drafts = 0.0
        self._of_all = 0.0
        self._had_drafts = False

    def step_done(self, *, has_prompts: bool, has_drafts: bool) -> None:
        """Counts a step. O(1)."""
        self._of_all += _WEIGHT * (has_prompts - self._of_all)
        if self._had_drafts:
            self.after_drafts += _WEIGHT * (has_prompts - self.after_drafts)
        else:
            self.after_drafts += _DRIFT * (self._of_all - self.after_drafts)
        self._had_drafts = has_drafts
