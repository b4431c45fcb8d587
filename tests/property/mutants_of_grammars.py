"""Mutants of token masks and of what is done with the tokens sampled under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

import support.engine
from radixkv.runtime.request import Request, Update
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.step.plan import Row
from radixkv.runtime.step.result import TokenMasks
from radixkv.runtime.structured.grammars import Grammars
from radixkv.runtime.structured.masks import fill_masks
from radixkv.wire.messages import TokenLogprobs

Patch = pytest.MonkeyPatch
Rows = Sequence[tuple[Row, Request]]


def change_masks(patch: Patch, change: Callable[[TokenMasks], TokenMasks]) -> None:
    """Changes the masks of every step."""

    def mutant(rows: Rows, grammars: Grammars, vocab_size: int) -> TokenMasks | None:
        masks = fill_masks(rows, grammars, vocab_size)
        return None if masks is None else change(masks)

    patch.setattr(support.engine, "fill_masks", mutant)


def swap_the_masks_of_two_rows(patch: Patch) -> None:
    change_masks(patch, lambda masks: TokenMasks(masks.positions, np.ascontiguousarray(masks.bits[::-1])))


def leave_the_last_mask_out(patch: Patch) -> None:
    change_masks(patch, lambda masks: TokenMasks(masks.positions[:-1], masks.bits[:-1]))


def forget_what_min_tokens_bans(patch: Patch) -> None:
    def mutant(rows: Rows, grammars: Grammars, vocab_size: int) -> TokenMasks | None:
        kept = [request.min_tokens for _, request in rows]
        for _, request in rows:
            request.min_tokens = 0
        masks = fill_masks(rows, grammars, vocab_size)
        for request, min_tokens in zip((request for _, request in rows), kept, strict=True):
            request.min_tokens = min_tokens
        return masks

    patch.setattr(support.engine, "fill_masks", mutant)


def forget_a_token_in_the_grammar(patch: Patch) -> None:
    append_tokens = Scheduler._append_tokens

    def mutant(
        self: Scheduler, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> Update:
        matcher = request.constraint
        if request.n_outputs == 1:
            request.constraint = None
        update = append_tokens(self, request, tokens, logprobs)
        request.constraint = matcher
        return update

    patch.setattr(Scheduler, "_append_tokens", mutant)


OF_GRAMMARS: tuple[Callable[[Patch], None], ...] = (
    swap_the_masks_of_two_rows,
    leave_the_last_mask_out,
    forget_what_min_tokens_bans,
    forget_a_token_in_the_grammar,
)
