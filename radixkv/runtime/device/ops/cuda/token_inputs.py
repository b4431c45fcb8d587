"""The kernels that update block tables and compute each token's id, position and slot mapping."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping
from radixkv.runtime.device.pack import RowArrays

_PAGES = 256
"""Block table entries that a program copies at a time."""
_TOKENS = 256
"""Tokens of one row per program, or rows per program where each row has one token."""
_UNALIGNED = (
    "batch_slots starts n_tokens firsts write_starts n_skipped ids_in ids_out positions_out slot_mapping_out "
    "window_slots_out"
).split()
"""Arguments that are slices at any offset: kernels must not be specialised on their alignment."""


class ChangedRows(Protocol):
    """Rows whose block tables change: int32 tensors, ``batch_slots`` [rows], the others may be longer."""

    @property
    def batch_slots(self) -> Tensor: ...

    @property
    def table_starts(self) -> Tensor: ...

    @property
    def update_firsts(self) -> Tensor: ...

    @property
    def update_counts(self) -> Tensor: ...


def update_tables(tables: Tensor, rows: ChangedRows, updates: Tensor) -> None:
    """Copies updates into block tables.

    For each row r, ``update_counts[r]`` page ids from ``updates[update_firsts[r]]`` on are stored in
    ``tables[batch_slots[r]]`` from entry ``table_starts[r]`` on.

    Args:
        tables: [batch slots, width] int32 block tables.
        rows: int32; ``batch_slots`` is [rows], the others may be longer. Rows with a count above 0 have different
            batch slots.
        updates: [n] int32, page ids.
    """
    _update_tables[(len(rows.batch_slots),)](
        tables,
        rows.batch_slots,
        rows.table_starts,
        rows.update_firsts,
        rows.update_counts,
        updates,
        tables.stride(0),
        BLOCK=_PAGES,
        num_warps=4,
        **overlapping(tables),
    )


@triton.jit(
    do_not_specialize_on_alignment=["batch_slots", "table_starts", "update_firsts", "update_counts", "updates"]
)
def _update_tables(
    tables: tl.tensor,
    batch_slots: tl.tensor,
    table_starts: tl.tensor,
    update_firsts: tl.tensor,
    update_counts: tl.tensor,
    updates: tl.tensor,
    table_stride: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    count = tl.load(update_counts + row)
    target = tables + tl.load(batch_slots + row).to(tl.int64) * table_stride + tl.load(table_starts + row)
    source = updates + tl.load(update_firsts + row)
    for first in range(0, count, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        pages = tl.load(source + entries, entries < count)
        tl.store(target + entries, pages, entries < count)


class WindowPlaces(NamedTuple):
    """Where layers with windows store K and V, which have pages of their own."""

    tables: Tensor
    """[batch slots + 1, width] int32: window block tables; the last row is for padding, which stores nothing."""
    pitch: int
    """Tokens from the beginning of one window page of a layer to that of the next."""


def prepare_token_inputs(
    tables: Tensor,
    last_tokens: Tensor,
    rows: RowArrays[Tensor],
    ids: Tensor,
    out: TokenInputs,
    *,
    page_size: int,
    max_n_tokens: int,
    page_pitch: int | None = None,
    windows: WindowPlaces | None = None,
) -> None:
    """Computes id, position and slot mapping of token i of row r at index ``firsts[r] + i``. All tensors are int32.

    The token is at place ``starts[r] + i`` of the block table, and ``n_skipped[r]`` further in its sequence.

    Args:
        tables: [batch slots, width] block tables.
        last_tokens: [batch slots], the token that each batch slot sampled last.
        rows: ``batch_slots`` is [rows], the others may be longer.
        ids: [tokens]; -1 stands for ``last_tokens[batch_slot]``.
        out: [tokens] each; its ids may be ``ids``. The slot mapping is -1 for places below ``write_starts[r]``.
        page_size: tokens per page.
        max_n_tokens: most tokens of a row.
        page_pitch: tokens from the beginning of one page of a layer to that of the next; None: ``page_size``.
        windows: where layers with windows store K and V of all positions, those below ``write_starts`` too, by
            ``out.in_windows``; None: all layers are in the same pages.
    """
    slots = out.slot_mapping
    in_windows = slots if windows is None or out.in_windows is None else out.in_windows.slot_mapping
    n_rows = len(rows.batch_slots)
    # Only two variants, so that nothing is compiled between steps.
    block_rows, block_tokens = (_TOKENS, 1) if max_n_tokens == 1 else (1, _TOKENS)
    _prepare_token_inputs[triton.cdiv(n_rows, block_rows), triton.cdiv(max_n_tokens, block_tokens)](
        tables,
        last_tokens,
        *rows[:5],
        rows.n_skipped,
        ids,
        out.ids,
        out.positions,
        slots,
        tables if windows is None else windows.tables,
        in_windows,
        tables.stride(0),
        len(tables) - 1,
        n_rows,
        PAGE_SIZE=page_size,
        PITCH=page_pitch or page_size,
        WINDOW_PITCH=None if windows is None else windows.pitch,
        ROWS=block_rows,
        TOKENS=block_tokens,
        num_warps=4,
        **overlapping(tables),
    )


@triton.jit(do_not_specialize=["n_rows", "padding_slot"], do_not_specialize_on_alignment=_UNALIGNED)
def _prepare_token_inputs(
    tables: tl.tensor,
    last_tokens: tl.tensor,
    batch_slots: tl.tensor,
    starts: tl.tensor,
    n_tokens: tl.tensor,
    firsts: tl.tensor,
    write_starts: tl.tensor,
    n_skipped: tl.tensor,
    ids_in: tl.tensor,
    ids_out: tl.tensor,
    positions_out: tl.tensor,
    slot_mapping_out: tl.tensor,
    window_tables: tl.tensor,
    window_slots_out: tl.tensor,
    table_stride: tl.tensor,
    padding_slot: tl.tensor,
    n_rows: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    PITCH: tl.constexpr,
    WINDOW_PITCH: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < n_rows
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[None, :]
    is_token = is_row & (token < tl.load(n_tokens + row, is_row, 0))
    batch_slot = tl.load(batch_slots + row, is_row, 0)
    index = tl.load(firsts + row, is_row, 0) + token
    place = tl.load(starts + row, is_row, 0) + token
    position = place + tl.load(n_skipped + row, is_row, 0)
    id_in = tl.load(ids_in + index, is_token, 0)
    last = tl.load(last_tokens + batch_slot, is_row, 0)
    tl.store(ids_out + index, tl.where(id_in == -1, last, id_in), is_token)
    tl.store(positions_out + index, position, is_token)
    is_written = is_token & (place >= tl.load(write_starts + row, is_row, 0))
    entry = batch_slot.to(tl.int64) * table_stride + place // PAGE_SIZE
    slot = tl.load(tables + entry, is_written, 0) * PITCH + place % PAGE_SIZE
    tl.store(slot_mapping_out + index, tl.where(is_written, slot, -1), is_token)
    if WINDOW_PITCH is not None:
        is_kept = is_token & (batch_slot < padding_slot)
        slot = tl.load(window_tables + entry, is_kept, 0) * WINDOW_PITCH + place % PAGE_SIZE
        tl.store(window_slots_out + index, tl.where(is_kept, slot, -1), is_token)
