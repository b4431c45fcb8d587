"""The kernels that apply logit biases, bans, penalties and token masks, and count tokens for penalties.

A token's count is an int16: its sign bit is set if the token is in the prompt, and the other bits count its
occurrences in the output. ``rows`` is [4, n] int32: each row's index in the logits, its batch slot, whether it has
penalties, and the index of its mask, or -1. ``masks`` is [m, words] int32, as in ``TokenMasks``. ``penalties`` is
[4, n] float32: repetition, its inverse, frequency, presence. All are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from radixkv.runtime.device.sampling.cuda.softmax_parts import PART
from radixkv.runtime.device.sampling.logit_edits import MAX_LOGIT

N_ROW_FIELDS = 4
"""Rows of ``rows``."""
_ENTRIES = 128
"""List entries, or counted rows, per program."""
_LARGEST: tl.constexpr = tl.constexpr(MAX_LOGIT)


class EditedRows(NamedTuple):
    """Rows of logits, what changes them, and where the results go."""

    logits: Tensor
    """[any, vocab], any float dtype."""
    counts: Tensor
    """[batch slots, vocab] int16."""
    rows: Tensor
    """[4, n] int32, see the module."""
    penalties: Tensor
    """[4, n] float32, see the module."""
    masks: Tensor
    """[m, words] int32, see the module."""
    out: Tensor
    """[n, vocab] float32."""


def edit_rows(edits: EditedRows) -> None:
    """Computes logits after penalties and masks; one launch."""
    n_rows, size = edits.out.shape
    _edit_rows[n_rows, triton.cdiv(size, PART.value)](
        *edits,
        edits.logits.stride(0),
        n_rows,
        size,
        edits.masks.shape[1],
        BLOCK=PART.value,
        num_warps=8,
    )


def edit_tokens(edits: EditedRows, lists: Tensor, longest: int) -> None:
    """Recomputes the logits of listed tokens, with a bias before their penalties; one launch.

    Args:
        edits: as for ``edit_rows``, which was called before.
        lists: [3, m] int64: addresses of lists, their sizes, and the row of ``edits.out`` that each belongs to. A
            list is [2, size] int32: distinct tokens, and the bits of their float32 biases.
        longest: size of the longest list.
    """
    n_lists = lists.shape[1]
    _edit_tokens[n_lists, triton.cdiv(longest, _ENTRIES)](
        *edits[:-1],
        lists,
        edits.out,
        edits.logits.stride(0),
        edits.out.shape[0],
        n_lists,
        edits.out.shape[1],
        edits.masks.shape[1],
        BLOCK=_ENTRIES,
        num_warps=4,
    )


def count_tokens(counts: Tensor, pairs: Tensor, tokens: Tensor, finite: Tensor) -> None:
    """Counts ``tokens[row]`` in the batch slot's output, unless ``finite[row]`` is 0; one launch.

    Args:
        counts: [batch slots, vocab] int16.
        pairs: [2, n] int32, batch slot and row; batch slots are distinct.
        tokens, finite: [any] int32.
    """
    n = pairs.shape[1]
    _count_tokens[(triton.cdiv(n, _ENTRIES),)](
        counts, pairs, tokens, finite, n, counts.shape[1], BLOCK=_ENTRIES, num_warps=4
    )


@triton.jit
def _apply_penalties(
    values: tl.tensor,
    counts: tl.tensor,
    repetition: tl.tensor,
    inverse: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
) -> tl.tensor:
    repeated = tl.where(values > 0.0, values * inverse, values * repetition)
    values = tl.where(counts != 0, repeated, values)
    n_outputs = counts & 0x7FFF
    return values - tl.where(n_outputs > 0, frequency * n_outputs.to(tl.float32) + presence, 0.0)


@triton.jit
def _clamp(values: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST)


@triton.jit
def _mask(
    values: tl.tensor,
    masks: tl.tensor,
    mask: tl.tensor,
    ids: tl.tensor,
    inside: tl.tensor,
    n_words: tl.tensor,
) -> tl.tensor:
    """Returns -inf for the tokens ``ids`` that the row's mask forbids; ``mask`` is its index, or -1."""
    word = tl.load(masks + mask.to(tl.int64) * n_words + ids // 32, inside & (mask >= 0), -1)
    return tl.where((word >> (ids % 32)) & 1 != 0, values, float("-inf"))


@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["rows", "penalties", "masks"])
def _edit_rows(
    logits: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    penalties: tl.tensor,
    masks: tl.tensor,
    edited: tl.tensor,
    stride: tl.tensor,
    n_rows: tl.tensor,
    size: tl.tensor,
    n_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < size
    source = logits + tl.load(rows + row).to(tl.int64) * stride
    values = tl.load(source + ids, inside, 0.0).to(tl.float32)
    if tl.load(rows + 2 * n_rows + row) != 0:
        batch_slot = tl.load(rows + n_rows + row).to(tl.int64)
        count = tl.load(counts + batch_slot * size + ids, inside, 0).to(tl.int32)
        values = _apply_penalties(
            values,
            count,
            tl.load(penalties + row),
            tl.load(penalties + n_rows + row),
            tl.load(penalties + 2 * n_rows + row),
            tl.load(penalties + 3 * n_rows + row),
        )
    values = _mask(_clamp(values), masks, tl.load(rows + 3 * n_rows + row), ids, inside, n_words)
    tl.store(edited + row.to(tl.int64) * size + ids, values, inside)


@triton.jit(
    do_not_specialize=["n_rows", "n_lists"], do_not_specialize_on_alignment=["rows", "penalties", "masks", "lists"]
)
def _edit_tokens(
    logits: tl.tensor,
    counts: tl.tensor,
    rows: tl.tensor,
    penalties: tl.tensor,
    masks: tl.tensor,
    lists: tl.tensor,
    edited: tl.tensor,
    stride: tl.tensor,
    n_rows: tl.tensor,
    n_lists: tl.tensor,
    size: tl.tensor,
    n_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    list_ = tl.program_id(0)
    entries = tl.load(lists + list_).to(tl.pointer_type(tl.int32))
    n_entries = tl.load(lists + n_lists + list_)
    row = tl.load(lists + 2 * n_lists + list_)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < n_entries
    token = tl.load(entries + entry, inside, 0)
    bias = tl.load(entries + n_entries + entry, inside, 0).to(tl.float32, bitcast=True)
    source = tl.load(rows + row).to(tl.int64)
    values = tl.load(logits + source * stride + token, inside, 0.0).to(tl.float32) + bias
    has_penalties = tl.load(rows + 2 * n_rows + row) != 0
    batch_slot = tl.load(rows + n_rows + row).to(tl.int64)
    count = tl.load(counts + batch_slot * size + token, inside & has_penalties, 0).to(tl.int32)
    values = _apply_penalties(
        values,
        count,
        tl.load(penalties + row),
        tl.load(penalties + n_rows + row),
        tl.load(penalties + 2 * n_rows + row),
        tl.load(penalties + 3 * n_rows + row),
    )
    values = tl.where(bias == float("-inf"), bias, _clamp(values))
    values = _mask(values, masks, tl.load(rows + 3 * n_rows + row), token, inside, n_words)
    tl.store(edited + row * size + token, values, inside)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["finite"])
def _count_tokens(
    counts: tl.tensor,
    pairs: tl.tensor,
    tokens: tl.tensor,
    finite: tl.tensor,
    n: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < n
    row = tl.load(pairs + n + pair, inside, 0)
    counted = inside & (tl.load(finite + row, inside, 0) != 0)
    addresses = counts + tl.load(pairs + pair, inside, 0).to(tl.int64) * size + tl.load(tokens + row, inside, 0)
    before = tl.load(addresses, counted, 0)
    n_outputs = before.to(tl.int32) & 0x7FFF
    tl.store(addresses, tl.where(n_outputs < 0x7FFF, before + 1, before), counted)
