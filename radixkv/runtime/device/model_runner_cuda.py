"""Packed steps -> logits and greedy tokens on the device; steps of few tokens by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import Attention, LayerAttention
from radixkv.runtime.device.attention.cuda.decode_plan import DecodeStep
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention_timer_cuda import AttentionTimer
from radixkv.runtime.device.graphs.decode import DecodeGraphs
from radixkv.runtime.device.graphs.piecewise import PieceGraphs
from radixkv.runtime.device.kv_pool_cpu import PageShape
from radixkv.runtime.device.kv_pool_cuda import CudaPool
from radixkv.runtime.device.model.decoder_cuda import CudaDecoder, Wanted
from radixkv.runtime.device.ops.cuda.argmax import argmax, argmax_scratch
from radixkv.runtime.device.pack_cuda import PackedStep
from radixkv.runtime.device.persistent_batch_cuda import RowFields, RowState
from radixkv.runtime.device.staging_cuda import Layout, Staging
from radixkv.runtime.device.transfer_cuda import to_device
from radixkv.runtime.step.plan import StepPlan

N_TIMES = 4
"""Int32 numbers that two times take."""


@dataclass(frozen=True)
class Outputs:
    """What a step leaves on the device, until the next one is enqueued."""

    logits: Tensor
    """[rows, vocab], of each row's last token."""
    report: Tensor
    """[``N_TIMES`` + 2 * rows] int32: the attention timer's times, then ``choice``, for one copy to the host."""
    hidden: Tensor | None = None
    """[tokens, hidden], of a step that was not one graph."""

    @property
    def choice(self) -> Tensor:
        """[2, rows] int32: each row's likeliest token, and 1 where all its logits are finite."""
        return self.report[N_TIMES:].view(2, -1)


class StepRunner:
    """Decoder, attention, pool and the slots' state on one GPU. Everything is enqueued; nothing waits.

    Args:
        decoder: the model.
        attention: of the same sizes; its fields, if it has any, are in ``layout``. What it plans goes back to it.
        rows: the rows' fields in ``layout``.
        layout: complete.
        width: entries of a block table.
        n_kept: most tokens of a step that runs in captured pieces.
        stream: what everything is enqueued on; it must be the current one.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        attention: Attention[Any, Any],
        rows: RowFields,
        layout: Layout,
        *,
        width: int,
        n_kept: int,
        stream: torch.cuda.Stream,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._rows = rows
        self._width = width
        self._n_kept = n_kept
        self._stream = stream
        self._device = stream.device
        self._staging = Staging(layout, self._device)
        self._logits = decoder.empty_logits(rows.max_rows)
        self._scratch = argmax_scratch(rows.max_rows, self._logits.shape[1], self._device)
        self._report = torch.zeros(N_TIMES + 2 * rows.max_rows, dtype=torch.int32, device=self._device)
        self.timer = AttentionTimer(decoder.n_layers, self._report[:N_TIMES].view(torch.int64))
        """Of every step."""
        self._pool: CudaPool | None = None
        self._graphs = DecodeGraphs(stream)
        self._pieces = PieceGraphs(decoder, stream)

    @property
    def pool(self) -> CudaPool:
        """The pool that was opened last."""
        assert self._pool is not None, "a runner is of use once it has a pool"
        return self._pool

    @property
    def logits_bytes(self) -> int:
        """Of one step's logits: those of the rows that are sampled are copied if not all are."""
        return self._logits.nbytes

    def open_pool(self, page: PageShape, n_pages: int) -> None:
        """Makes a pool in place of the one before, and forgets graphs and block tables."""
        self._graphs.clear()
        self._pieces.clear()
        self._pool = None  # its memory is needed for the next
        self._pool = CudaPool(page, n_pages, self._device)
        self._state = RowState(
            self._rows,
            self._staging,
            width=self._width,
            zero_page=self._pool.zero_page,
            page_size=page.page_size,
            n_kept=self._n_kept,
            device=self._device,
        )
        self._attention.connect(self._staging, self._state.tables)

    def capture(self, sizes: Sequence[int]) -> int:
        """Captures decode steps of these many rows, over the pool, if attention can be captured; how many graphs.
        Up to seconds."""
        return self._graphs.capture(sizes, self._attention.variants, self._stage_padding, self._decode)

    def capture_pieces(self, sizes: Sequence[int]) -> int:
        """Captures, over the pool, what lies between the attentions of other steps of these many tokens; how many
        graphs. Up to a second."""
        return self._pieces.capture(sizes, self._state.kept, self.pool)

    def measure_largest(self, max_tokens: int, max_model_len: int) -> int:
        """Bytes that a step of so many tokens takes at its peak. It reads and writes nothing of worth. Waits."""
        n_rows = min(self._rows.max_rows, -(-max_tokens // max_model_len))
        n_tokens = np.full(n_rows, min(max_tokens // n_rows, max_model_len), np.int32)
        zeros = np.zeros(n_rows, np.int32)
        ends = np.cumsum(n_tokens, dtype=np.int32)
        step = PackedStep(
            plan=StepPlan(0, ()),
            n_decode=0,
            batch_slots=np.full(n_rows, self._rows.max_rows, np.int32),
            starts=zeros,
            n_tokens=n_tokens,
            firsts=ends - n_tokens,
            write_starts=n_tokens,
            table_starts=zeros,
            update_firsts=zeros,
            update_counts=zeros,
            ids=np.zeros(int(ends[-1]), np.int32),
            updates=zeros[:0],
        )
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._run(step)
        self._stream.synchronize()
        return torch.cuda.max_memory_allocated(self._device) - before

    def enqueue(self, step: PackedStep) -> Outputs:
        """One step."""
        if step.plan.copies:
            self.pool.copy(step.plan.copies)
        bucket = None
        if self._rows.fits(step) and not any(row.scoring for row in step.plan.rows):
            bucket = self._graphs.bucket(step.n_rows)
        return self._run(step) if bucket is None else self._replay(step, bucket)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab], in memory of their own."""
        logits = self._decoder.empty_logits(len(hidden))
        self._decoder.logits(hidden, logits)
        return logits

    def keep(self, rows: Tensor, tokens: Tensor) -> None:
        """These, not the likeliest tokens, are what the slots of staged rows sampled: [n] int64, [n] int32."""
        batch_slots = self._state.batch_slots(self._rows.max_rows).index_select(0, rows)
        self._state.last_tokens.index_copy_(0, batch_slots.long(), tokens)

    def _replay(self, step: PackedStep, bucket: int) -> Outputs:
        staged = self._staging.stage()
        self._rows.fill_decode(staged, step, bucket)
        decode = self._attention.plan_decode(staged, step.batch_slots, step.lengths, step.plan.shared, bucket)
        self._staging.send(staged)
        self._graphs.replay(bucket, decode.variant)
        return self._outputs(bucket)

    def _run(self, step: PackedStep) -> Outputs:
        n_decode = step.n_decode
        staged = self._staging.stage()
        self._rows.fill(staged, step, step.n_rows)
        decode = prompts = None
        if n_decode:
            batch_slots, lengths = step.batch_slots[:n_decode], step.lengths[:n_decode]
            decode = self._attention.plan_decode(staged, batch_slots, lengths, step.plan.shared, None)
        self._staging.send(staged)
        if len(step.updates):
            self._state.update(step.n_rows, to_device(step.updates, self._device))
        if n_decode < step.n_rows:
            prompts = self._attention.plan_prompts(
                step.batch_slots[n_decode:], step.starts[n_decode:], step.n_tokens[n_decode:]
            )
        forward = self._placed(step)
        attention = self._planned(decode, prompts)
        lasts = to_device(step.firsts + step.n_tokens - 1, self._device)
        if any(row.scoring for row in step.plan.rows):
            hidden = forward(attention, None)
            self._choose(hidden.index_select(0, lasts))
            return self._outputs(step.n_rows, hidden)
        self._choose(forward(attention, Wanted(lasts, lambda: self._last_tokens_attention(step))))
        return self._outputs(step.n_rows)

    def _placed(self, step: PackedStep) -> Callable[[LayerAttention, Wanted | None], Tensor]:
        """Enqueues where the tokens stand; gives the way through the layers."""
        ids, most = to_device(step.ids, self._device), int(step.n_tokens.max())
        bucket = self._pieces.bucket(len(ids))
        if bucket is None:
            return partial(self._decoder, self._state.place(step.n_rows, ids, most), self.pool)
        self._state.place_kept(step.n_rows, ids, most, bucket)
        return partial(self._pieces.run, bucket, len(ids), self.pool)

    def _planned(self, decode: object, prompts: object) -> LayerAttention:
        return self.timer.timed(self._attention.step(decode, prompts))

    def _last_tokens_attention(self, step: PackedStep) -> LayerAttention:
        """Of each row's last token. It takes the place of the staged step's, which must be enqueued by now."""
        staged = self._staging.stage()
        self._rows.fill(staged, step, step.n_rows)
        decode = self._attention.plan_decode(staged, step.batch_slots, step.lengths)
        self._staging.send(staged)
        return self._planned(decode, None)

    def _stage_padding(self, bucket: int, variant: Variant) -> DecodeStep:
        """Makes a step of rows that only pad, for a capture."""
        staged = self._staging.stage()
        self._rows.pad(staged, 0, bucket)
        nobody = np.empty(0, np.int32)
        decode: DecodeStep = self._attention.plan_decode(staged, nobody, nobody, bucket=bucket, variant=variant)
        self._staging.send(staged)
        return decode

    def _decode(self, step: DecodeStep) -> None:
        """What a graph holds."""
        self._state.update(step.n_rows)
        places = self._state.place_decode(step.n_rows)
        self._choose(self._decoder(places, self.pool, self._planned(step, None)))

    def _choose(self, last: Tensor) -> None:
        """Logits and the likeliest token of each row, which the slots' next steps start with."""
        n_rows = len(last)
        outputs = self._outputs(n_rows)
        self._decoder.logits(last, outputs.logits)
        tokens, finite = outputs.choice
        argmax(
            outputs.logits,
            tokens,
            finite,
            self._scratch[:n_rows],
            batch_slots=self._state.batch_slots(n_rows),
            last_tokens=self._state.last_tokens,
        )

    def _outputs(self, n_rows: int, hidden: Tensor | None = None) -> Outputs:
        return Outputs(self._logits[:n_rows], self._report[: N_TIMES + 2 * n_rows], hidden)
