"""The result of a step, from what the device has computed for its sampled positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.wire.messages import TokenLogprobs


def step_result(
    plan: StepPlan,
    sampled: NDArray[np.integer[Any]],
    logprobs: Mapping[int, TokenLogprobs | None],
    prompt_logprobs: Sequence[tuple[int, list[TokenLogprobs] | None]],
    device_seconds: float,
    pooled: Mapping[int, bytes] | None = None,
    page_scores: tuple[float, ...] = (),
) -> StepResult:
    """Returns the result of a step. O(rows + drafts + prompt logprobs).

    Args:
        plan: the step's plan.
        sampled: [2, positions or more]: the token of each sampled position, and whether its logits are finite; what
            comes after the plan's positions is padding.
        logprobs: by sampled position; empty if no row reports them.
        prompt_logprobs: index of the row and logprobs of each chunk of prompt tokens, in their order; None for a
            chunk that is not finite.
        device_seconds: time of the step on the device.
        pooled: by row, what it reports of its last position; None if no row does.
        page_scores: of all ``Row.scored_pages``.
    """
    rows, n_positions = plan.rows, len(plan.rows) + plan.n_drafts
    tokens, are_finite = sampled[:, :n_positions]
    finite = are_finite.astype(np.bool_)
    if finite.all() and not prompt_logprobs and all(row.sampling is not None for row in rows):
        all_finite = (True,) * len(rows)
        return StepResult(
            tuple(tokens.tolist()),
            all_finite,
            _by_position(logprobs, finite),
            (),
            device_seconds,
            page_scores=page_scores,
        )
    firsts = plan.first_positions()
    if plan.n_drafts:
        finite = np.logical_and.reduceat(finite, firsts)
    prompt: dict[int, list[TokenLogprobs]] = {i: [] for i, row in enumerate(rows) if row.scoring is not None}
    for row, chunk in prompt_logprobs:
        finite[row] &= chunk is not None
        prompt[row] += chunk or ()
    samples = finite & np.array([row.sampling is not None for row in rows])
    if plan.n_drafts:
        counts = np.diff([*firsts, n_positions])
        samples, finite_positions = np.repeat(samples, counts), np.repeat(finite, counts)
    else:
        finite_positions = finite
    return StepResult(
        tokens=tuple(np.where(samples, tokens, -1).tolist()),
        finite=tuple(finite.tolist()),
        logprobs=_by_position(logprobs, finite_positions),
        prompt_logprobs=tuple(tuple(prompt[i]) if i in prompt and finite[i] else None for i in range(len(rows)))
        if prompt
        else (),
        device_seconds=device_seconds,
        pooled=tuple(pooled.get(i) if finite[i] else None for i in range(len(rows))) if pooled else (),
        page_scores=page_scores,
    )


def _by_position(
    logprobs: Mapping[int, TokenLogprobs | None], finite: NDArray[np.bool_]
) -> tuple[TokenLogprobs | None, ...]:
    """Returns the logprobs of each sampled position; ``finite`` says by position whether its row is."""
    if not logprobs:
        return ()
    return tuple(logprobs.get(position) if finite[position] else None for position in range(len(finite)))
