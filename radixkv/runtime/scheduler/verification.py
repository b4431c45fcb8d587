"""Verification: which drafts of a step are accepted."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import unpack_tokens


def verify(
    plan: StepPlan, requests: Sequence[Request], result: StepResult, drafts: Drafts
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns each row's first sampled position in the result, and how many of its drafts are accepted.

    A draft is accepted if those before it are, if it is the token that is sampled before it, and if that does not
    end the output. See docs/decisions/0061-rows-with-drafts.md. O(rows + drafts).

    Args:
        plan: of the step.
        requests: [rows].
        result: of the step.
        drafts: is told how many drafts of each row are accepted, if the row counts.
    """
    if not plan.n_drafts:
        return range(len(plan.rows)), [0] * len(plan.rows)
    firsts: list[int] = []
    n_accepted: list[int] = []
    first = 0
    for row, request, is_finite in zip(plan.rows, requests, result.finite, strict=True):
        n = 0
        if (
            row.n_drafts
            and is_finite
            and not (request.phase is Phase.FINISHED or request.recovery.discards_results)
        ):
            assert row.tokens is not None, "drafts follow known tokens"
            end_tokens = request.constraint.end_tokens if request.constraint is not None else ()
            guessed = unpack_tokens(row.tokens[TOKEN_BYTES:])
            for token, draft in zip(result.tokens[first : first + row.n_drafts], guessed, strict=True):
                if token != draft or token in request.stop_token_ids or token in end_tokens:
                    break
                n += 1
            drafts.verified(request, row.n_drafts, n)
        firsts.append(first)
        n_accepted.append(n)
        first += 1 + row.n_drafts
    return firsts, n_accepted
