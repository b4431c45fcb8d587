"""Logprobs of tokens under the model's original logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.runtime.device.memory.cuda.array_copies import to_device, to_host
from radixkv.runtime.device.sampling.cuda.softmax_parts import (
    LOG2_E,
    PART,
    load_values,
    parts_width,
    weigh_parts,
    weights_of,
)
from radixkv.runtime.device.sampling.cuda.top_tokens import list_largest
from radixkv.wire.messages import TokenLogprobs

_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


class PendingLogprobs:
    """Logprobs of one token per row, being copied to the host.

    Construct it after the tokens' computation is enqueued; nothing waits. Five launches at most.

    Args:
        logits: [any, vocab], any float dtype.
        rows: [n], indices of the rows of ``logits``.
        n_listed: [n], how many of the likeliest tokens to list for each row; the time grows with the most.
        tokens: [any] int32, by row of the logits.
        finite: [any] int32, 0 or 1, by row of the logits.
    """

    def __init__(
        self, logits: Tensor, rows: Sequence[int], n_listed: Sequence[int], tokens: Tensor, finite: Tensor
    ) -> None:
        vocab_size = logits.shape[1]
        self._n_listed = [min(n, vocab_size) for n in n_listed]
        width = max(self._n_listed)
        arguments = np.empty((3, len(rows)), dtype=np.int32)
        arguments[:2] = rows, self._n_listed
        arguments[2] = np.full(len(rows), LOG2_E, dtype=np.float32).view(np.int32)
        sources, counts, scales = to_device(arguments, logits.device)
        result = torch.zeros(len(rows), 3 + 2 * width, dtype=torch.int32, device=logits.device)
        if width:
            ids, largest = list_largest(logits, sources, counts, width)
            result[:, 3 : 3 + width] = ids
            result[:, 3 + width :] = largest.view(torch.int32)
        parts = weigh_parts(logits, sources, scales.view(torch.float32))
        _compare[(len(rows),)](
            logits,
            parts,
            sources,
            tokens,
            finite,
            counts,
            result,
            logits.stride(0),
            parts.shape[2],
            width,
            vocab_size,
            N_PARTS=parts_width(vocab_size),
            BLOCK=PART.value,
            num_warps=8,
        )
        self._result = to_host(result)

    def collect(self) -> list[TokenLogprobs | None]:
        """Returns logprobs by row, None where logits are not finite; call it after the step's event."""
        result = self._result.numpy()
        width = (result.shape[1] - 3) // 2
        ids = result[:, 3 : 3 + width].astype("<i4")
        logprobs = result[:, 3 + width :].copy().view(np.float32).astype("<f4")
        own = result[:, 0].copy().view(np.float32).tolist()
        ranks, finite = result[:, 1].tolist(), result[:, 2].tolist()
        return [
            TokenLogprobs(own[row], ranks[row], ids[row, :n].tobytes(), logprobs[row, :n].tobytes())
            if finite[row]
            else None
            for row, n in enumerate(self._n_listed)
        ]


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["sources", "finite", "counts"])
def _compare(
    logits: tl.tensor,
    parts: tl.tensor,
    sources: tl.tensor,
    tokens: tl.tensor,
    finite: tl.tensor,
    counts: tl.tensor,
    result: tl.tensor,
    stride: tl.tensor,
    n_parts: tl.tensor,
    width: tl.tensor,
    size: tl.tensor,
    N_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Fills a row of ``result``: logprob as bits, rank, whether finite, listed ids, and listed logprobs as bits.

    ``list_largest`` has stored logits in place of the listed logprobs.
    """
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(sources + row)
    part_ids = tl.arange(0, N_PARTS)
    maxima = tl.load(parts + 2 * row * n_parts + part_ids, part_ids < n_parts, float("-inf"))
    sums = tl.load(parts + (2 * row + 1) * n_parts + part_ids, part_ids < n_parts, 0.0)
    top = tl.max(maxima, 0)
    log_sum = tl.log2(tl.sum(sums * weights_of(maxima, top, 1.4426950408889634), 0)) * _LN_2
    values = logits + source.to(tl.int64) * stride
    own = tl.load(values + tl.load(tokens + source)).to(tl.float32)
    larger = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, size, BLOCK):
        larger += (load_values(values, first + tl.arange(0, BLOCK), size) > own).to(tl.int32)
    result += row * (3 + 2 * width)
    tl.store(result, (own - top - log_sum).to(tl.int32, bitcast=True))
    tl.store(result + 1, 1 + tl.sum(larger, 0))
    tl.store(result + 2, tl.load(finite + source))
    for index in range(tl.load(counts + row)):
        listed = tl.load(result + 3 + width + index).to(tl.float32, bitcast=True)
        tl.store(result + 3 + width + index, (listed - top - log_sum).to(tl.int32, bitcast=True))
