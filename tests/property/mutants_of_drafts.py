"""Mutants of the rows with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import support.engine
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler import scheduler
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.step.result import StepResult, TokenMasks
from radixkv.runtime.structured.grammars import Grammars
from radixkv.runtime.structured.masks import fill_masks
from support.fake_grammars import FakeMatcher

Patch = pytest.MonkeyPatch


def _change_accepted(patch: Patch, change: Callable[[int, int], int]) -> None:
    """Changes how many drafts of a row count as accepted; ``change`` gets that and the row's drafts."""
    verify = scheduler.verify

    def mutant(
        plan: StepPlan, requests: Sequence[Request], result: StepResult, drafts: Drafts
    ) -> tuple[Sequence[int], Sequence[int]]:
        firsts, accepted = verify(plan, requests, result, drafts)
        return firsts, [change(n, row.n_drafts) for n, row in zip(accepted, plan.rows, strict=True)]

    patch.setattr(scheduler, "verify", mutant)


def accept_one_too_many(patch: Patch) -> None:
    _change_accepted(patch, lambda n, n_drafts: min(n + 1, n_drafts))


def accept_all_drafts(patch: Patch) -> None:
    _change_accepted(patch, lambda _, n_drafts: n_drafts)


def drop_an_accepted_draft(patch: Patch) -> None:
    _change_accepted(patch, lambda n, _: max(0, n - 1))


def plan_beside_its_own_drafts(patch: Patch) -> None:
    patch.setattr(Scheduler, "wants_results", property(lambda self: False))


def ban_by_the_first_index(patch: Patch) -> None:
    max_drafts = Request.max_drafts.fget
    assert max_drafts is not None

    def mutant(self: Request) -> int:
        limit: int = max_drafts(self)
        return max(limit, self.max_tokens - self.n_outputs - 1) if limit > 0 else limit

    patch.setattr(Request, "max_drafts", property(mutant))


def mask_without_advancing(patch: Patch) -> None:
    """Has all positions of a row the mask of its first one."""

    def mutant(rows: Sequence[tuple[Row, Request]], grammars: Grammars, vocab_size: int) -> TokenMasks | None:
        masks = fill_masks(rows, grammars, vocab_size)
        if masks is None:
            return None
        index_of = {position: index for index, position in enumerate(masks.positions)}
        firsts: list[int] = []  # by position: the first one of its row
        for row, _ in rows:
            firsts += [len(firsts)] * (1 + row.n_drafts)
        bits = masks.bits[[index_of[firsts[position]] for position in masks.positions]]
        return TokenMasks(masks.positions, bits)

    patch.setattr(support.engine, "fill_masks", mutant)


def forget_the_rollback(patch: Patch) -> None:
    patch.setattr(FakeMatcher, "truncate", lambda self, n_tokens: None)


OF_DRAFTS: tuple[Callable[[Patch], None], ...] = (
    accept_one_too_many,
    accept_all_drafts,
    drop_an_accepted_draft,
    plan_beside_its_own_drafts,
    ban_by_the_first_index,
    mask_without_advancing,
    forget_the_rollback,
)
