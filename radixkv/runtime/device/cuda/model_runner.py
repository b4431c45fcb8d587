"""Runs packed steps on the GPU up to logits and argmax tokens, small steps by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.adapters.cuda.blocks import StepAdapters
from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.attention.cuda.base import AttentionPlanner, DecodeRows
from radixkv.runtime.device.attention.cuda.decode_plan import DecodeStep
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.collectives import Collectives
from radixkv.runtime.device.cuda.persistent_batch import PersistentBatch, RowFields
from radixkv.runtime.device.cuda.window_tables import WindowFields, WindowTables
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.graphs.decode import DecodeGraphs, decode_buckets
from radixkv.runtime.device.graphs.piecewise import PiecewiseGraphs, token_buckets
from radixkv.runtime.device.memory.cuda.array_copies import to_device
from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates, SortedSaves
from radixkv.runtime.device.memory.cuda.slab_pool import CudaSlabPool
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingLayout
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.memory.slab_shape import SlabShape
from radixkv.runtime.device.model.decoder import Decoder, OutputTokens
from radixkv.runtime.device.ops.base import BlockArrays, DeviceSequences, TokenInputs
from radixkv.runtime.device.ops.cuda.argmax import argmax, argmax_scratch
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_arrays
from radixkv.runtime.device.pack import Ints, PackedStep, RowArrays
from radixkv.runtime.step.plan import StepPlan


@dataclass(frozen=True)
class StepOutputs:
    """Results of a step on the device, valid until the next step is enqueued."""

    logits: Tensor
    """[rows, vocab]: logits of each row's last token. After a replayed graph, rows include its padding."""
    argmax_result: Tensor
    """[2, rows] int32, contiguous: each row's argmax token, and 1 where all its logits are finite."""
    hidden: Tensor | None = None
    """[tokens, hidden] of a step with prompt logprobs; None otherwise."""
    last: Tensor | None = None
    """[rows and padding, hidden]: states of the rows' last tokens; None after a replayed graph."""


class ModelRunner:
    """Runs the decoder over the KV pool and persistent batch of one GPU.

    Work is only enqueued; nothing waits unless a method says so.

    Args:
        decoder: the model.
        attention: for the decoder's heads; ``layout`` holds its staging fields, if it has any.
        layout: the staging fields of a step's rows are added to it; none is added later.
        settings: sizes of pages, rows and steps, and whether there are graphs, or window pages.
        stream: all work is enqueued here; it must be the current stream.
        collectives: of this rank.
        states: of recurrent layers; None: the model has none.
        adapters: of the rows of a step, which the decoder's products read; None: no row has one.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionPlanner[Any, Any],
        layout: StagingLayout,
        settings: DeviceSettings,
        stream: torch.cuda.Stream,
        collectives: Collectives,
        states: CudaStates | None = None,
        adapters: StepAdapters | None = None,
    ) -> None:
        self._decoder = decoder
        self._adapters = adapters
        self._collectives = collectives
        self._attention = attention
        self._settings = settings
        self.states = states
        """States of recurrent layers; None: the model has none."""
        max_rows, has_graphs = settings.max_num_seqs, not settings.enforce_eager
        self.decode_sizes = decode_buckets(max_rows) if has_graphs else []
        """Numbers of rows to capture decode graphs for."""
        self.piecewise_sizes = token_buckets(settings.max_num_batched_tokens) if has_graphs else []
        """Numbers of tokens to capture piecewise graphs for."""
        self._row_fields = RowFields(max_rows, layout)
        self._window_fields = WindowFields(max_rows, layout) if settings.has_window_pages else None
        self._stream = stream
        self._device = stream.device
        self._staging = Staging(layout, self._device)
        self._logits = decoder.empty_logits(max_rows)
        self._scratch = argmax_scratch(max_rows, self._logits.shape[1], self._device)
        self._argmax_results = torch.zeros(2 * max_rows, dtype=torch.int32, device=self._device)
        self._pool: CudaPool | CudaSlabPool | None = None
        kinds = (False,) if adapters is None else (False, True)
        self._graphs = {has_adapters: DecodeGraphs(stream) for has_adapters in kinds}
        """Of steps without rows of adapters, and of steps with some."""
        self._piecewise = {has_adapters: PiecewiseGraphs(decoder, stream) for has_adapters in kinds}
        """Likewise."""

    @property
    def samples(self) -> bool:
        """Whether this rank samples."""
        return self._collectives.rank == 0

    @property
    def pool(self) -> CudaPool | CudaSlabPool:
        """The KV pool opened last."""
        assert self._pool is not None, "open_pool must be called first"
        return self._pool

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and logits."""
        return self._logits.dtype

    @property
    def logits_bytes(self) -> int:
        """Bytes of one step's logits. Sampling may copy as much, where it takes only some of the rows."""
        return self._logits.nbytes

    def open_pool(self, page: PageLayout, n_pages: int, slabs: SlabShape | None = None) -> None:
        """Replaces the KV pool, and drops graphs and block tables.

        Args:
            page: of all layers.
            n_pages: pages of all layers.
            slabs: of the pool in place of such pages; only with ``has_window_pages`` in the settings.
        """
        for has_adapters in self._graphs:
            self._graphs[has_adapters].clear()
            self._piecewise[has_adapters].clear()
        self._pool = None  # frees its memory for the next one
        if slabs is None:
            self._pool = CudaPool(page, n_pages, self._device, self.states)
        else:
            self._pool = CudaSlabPool(slabs, self._device)
        windows = self._open_window_tables(self._pool)
        # The first copies load kernels, for which the driver waits until the device is idle: not within a step.
        # torch has one kernel for up to 16 indices, and one for more.
        for n_pages_copied in (1, 17):
            self._pool.copy([(self._pool.zero_page, self._pool.zero_page)] * n_pages_copied)
            if isinstance(self._pool, CudaSlabPool):
                self._pool.copy_windows(
                    [(self._pool.zero_window_page, self._pool.zero_window_page)] * n_pages_copied
                )
        if self.states is not None:
            self.states.warm_up()
        self._batch = PersistentBatch(
            self._row_fields,
            self._staging,
            self._settings,
            zero_page=self._pool.zero_page,
            page_pitch=self._pool.page_pitch,
            windows=windows,
            max_static_tokens=max(self.piecewise_sizes, default=0),
        )
        self._attention.connect(self._staging, self._batch.tables, None if windows is None else windows.tables)

    def _open_window_tables(self, pool: CudaPool | CudaSlabPool) -> WindowTables | None:
        """Returns empty window block tables for a pool with window pages."""
        if not isinstance(pool, CudaSlabPool):
            return None
        assert self._window_fields is not None, "a pool has slabs only where the settings have window pages"
        return WindowTables(
            self._window_fields,
            self._staging,
            width=-(-self._settings.max_model_len // self._settings.page_size),
            zero_page=pool.zero_window_page,
            page_pitch=pool.window_pitch,
        )

    def capture(self, sizes: Sequence[int]) -> int:
        """Captures decode graphs over the pool for these numbers of rows, if attention supports graphs. Takes up
        to seconds. Returns the number of graphs."""
        warm_up, body = (partial(self._decode, run) for run in (self._decoder.run_distinct, self._decoder))
        n_graphs = 0
        for has_adapters, graphs in self._graphs.items():
            prepare = partial(self._stage_padding, has_adapters=has_adapters)
            n_graphs += graphs.capture(sizes, self._variants, prepare, warm_up, body)
        return n_graphs

    def _variants(self, bucket: int) -> list[Variant]:
        """Returns the variants of a bucket: with states, none for several tokens of a row."""
        variants = self._attention.variants(bucket)
        return [variant for variant in variants if self.states is None or variant != "extend"]

    def capture_piecewise(self, sizes: Sequence[int]) -> int:
        """Captures piecewise graphs over the pool for these numbers of tokens. Takes up to a second. Returns the
        number of graphs."""
        n_graphs = 0
        for has_adapters, graphs in self._piecewise.items():
            inputs = partial(self._static_inputs, has_adapters=has_adapters)
            n_graphs += graphs.capture(sizes, inputs, self.pool)
        return n_graphs

    def _static_inputs(self, n_tokens: int, *, has_adapters: bool) -> TokenInputs:
        """Plans a step without rows of adapters, for a capture, and returns the inputs of its tokens."""
        self._plan_adapters(_no_slots(has_adapters), n_tokens)
        return self._batch.static_inputs(n_tokens)

    def measure_largest(self) -> int:
        """Runs a dummy step of most tokens, which stores nothing, and returns its peak bytes. Waits."""
        max_tokens, max_model_len = self._settings.max_num_batched_tokens, self._settings.max_model_len
        n_rows = min(self._row_fields.max_rows, -(-max_tokens // max_model_len))
        n_tokens = np.full(n_rows, min(max_tokens // n_rows, max_model_len), np.int32)
        zeros = np.zeros(n_rows, np.int32)
        ends = np.cumsum(n_tokens, dtype=np.int32)
        batch_slots = np.full(n_rows, self._row_fields.max_rows, np.int32)
        rows = RowArrays(
            batch_slots, zeros, n_tokens, ends - n_tokens, n_tokens, zeros, zeros, zeros, batch_slots, zeros
        )
        step = PackedStep(StepPlan(0, ()), rows, np.zeros(int(ends[-1]), np.int32), zeros[:0])
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        for has_adapters in self._graphs:
            self._run(step, np.zeros(len(step.ids), np.int32) if has_adapters else None)
            self.broadcast_last_tokens()
        self._stream.synchronize()
        return torch.cuda.max_memory_allocated(self._device) - before

    def count_split(self, step: PackedStep) -> int:
        """Returns how many leading rows ``PackedStep.split`` should split: the decode rows, or all rows if the
        prompts are so short that the step fits a decode graph. O(rows).

        The host launches a graph in 1 ms, and an 8B model's step with prompts layer by layer in 3 to 8. The device
        takes about as long for both (decision 63).
        """
        rows, n_decode = step.rows, step.n_decode
        if (
            n_decode < step.n_rows
            and self.states is None  # a state's tokens come one after the other
            and self._graphs[False].bucket(len(step.ids)) is not None
            and self._fits_windows(step)
            and self._attention.fits_prompts(rows.starts[n_decode:], rows.n_tokens[n_decode:])
            and not any(row.reports_states for row in step.plan.rows)
        ):
            return step.n_rows
        return n_decode

    def enqueue(self, step: PackedStep) -> StepOutputs:
        """Enqueues one step."""
        if step.plan.copies:
            self.pool.copy(step.plan.copies)
        if step.plan.window_copies:
            assert isinstance(self.pool, CudaSlabPool), "checked by the executor"
            self.pool.copy_windows(step.plan.window_copies)
        if self.states is None:
            return self._enqueue(step)
        saves = SortedSaves.of(step.plan)
        self.states.load(step.plan)
        self.states.save(saves.before)
        outputs = self._enqueue(step)
        self.states.save(saves.after)
        return outputs

    def _enqueue(self, step: PackedStep) -> StepOutputs:
        bucket = None
        is_decode = step.n_decode == step.n_rows
        if is_decode and self._fits_windows(step) and not any(row.reports_states for row in step.plan.rows):
            bucket = self._graphs[False].bucket(step.n_rows)
        slots = None if self._adapters is None else self._adapters.token_slots(step.plan)
        return self._run(step, slots) if bucket is None else self._replay(step, bucket, slots)

    def _fits_windows(self, step: PackedStep) -> bool:
        """Whether the step has few enough changes of window block tables for their staging field."""
        return self._window_fields is None or self._window_fields.fits(step.plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab], newly allocated. All ranks must do this; rank 0 alone gets logits."""
        logits = self._decoder.empty_logits(len(hidden))
        self._decoder.logits(hidden, logits)
        return logits

    def set_last_tokens(self, rows: Tensor, tokens: Tensor) -> None:
        """Stores sampled tokens, in place of the argmax tokens, as their batch slots' last tokens.

        Args:
            rows: [n] int64, indices of staged rows.
            tokens: [n] int32.
        """
        slots = self._batch.sampled_slots(self._row_fields.max_rows).index_select(0, rows)
        self._batch.last_tokens.index_copy_(0, slots.long(), tokens)

    def broadcast_last_tokens(self) -> None:
        """Gives all ranks the tokens that rank 0 has sampled; the end of each step."""
        self._collectives.broadcast(self._batch.last_tokens)

    def _plan_adapters(self, slots: Ints | None, n_padded: int, outputs: Ints | None = None) -> None:
        """See ``StepAdapters.plan``."""
        if self._adapters is not None:
            self._adapters.plan(slots, n_padded, outputs)

    def _replay(self, step: PackedStep, bucket: int, slots: Ints | None) -> StepOutputs:
        if not self._row_fields.fits_updates(step):
            self._batch.update_ahead(step)
            step = step.without_updates()
        staged = self._staging.stage()
        self._row_fields.fill_decode(staged, step, bucket)
        if self._window_fields is not None:
            self._window_fields.fill(staged, step.plan)
        decode = self._attention.plan_decode(staged, _decode_rows(step), bucket)
        self._staging.send(staged)
        self._plan_adapters(slots, bucket)
        self._graphs[slots is not None].replay(bucket, decode.variant)
        return self._outputs(bucket)

    def _run(self, step: PackedStep, slots: Ints | None) -> StepOutputs:
        """Runs a step without a decode graph.

        Args:
            step: the step.
            slots: [tokens], of each token's adapter; None: no row has one.
        """
        n_decode = step.n_decode
        staged = self._staging.stage()
        self._row_fields.fill(staged, step, step.n_rows)
        decode = prompts = None
        if n_decode:
            decode = self._attention.plan_decode(staged, _decode_rows(step))
        self._staging.send(staged)
        if len(step.updates):
            self._batch.update(step.n_rows, to_device(step.updates, self._device))
        self._batch.update_windows(step.plan)
        if n_decode < step.n_rows:
            prompts = self._attention.plan_prompts(
                step.rows.batch_slots[n_decode:], step.rows.starts[n_decode:], step.rows.n_tokens[n_decode:]
            )
        lasts = self._padded(step.rows.firsts + step.rows.n_tokens - 1)
        piecewise = self._piecewise[slots is not None]
        bucket = piecewise.bucket(len(step.ids))
        self._plan_adapters(slots, bucket or len(step.ids), lasts)
        forward = self._prepare_forward(step, piecewise, bucket)
        attention = self._attention.step(decode, prompts)
        last_indices = to_device(lasts, self._device)
        if any(row.scoring for row in step.plan.rows):
            hidden = forward(attention, None)
            last = hidden.index_select(0, last_indices)
            self._compute_argmax(last, step.n_rows)
            return self._outputs(step.n_rows, hidden, last)
        outputs = OutputTokens(last_indices, lambda: self._last_tokens_attention(step))
        if self._adapters is not None:
            outputs = replace(outputs, select=self._adapters.select_outputs)
        last = forward(attention, outputs)
        self._compute_argmax(last, step.n_rows)
        return self._outputs(step.n_rows, None, last)

    def _padded(self, indices: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pads indices with zeros up to a number of rows for which a decode graph was captured, if there is one.

        The products of the last layer then have a number of rows that they had before. For another number cuBLAS
        may choose a kernel that was never used, which the driver loads only when the device is idle.
        """
        n_rows = self._graphs[False].bucket(len(indices)) or len(indices)
        return np.pad(indices, (0, n_rows - len(indices)))

    def _prepare_forward(
        self, step: PackedStep, piecewise: PiecewiseGraphs, bucket: int | None
    ) -> Callable[[LayerAttention, OutputTokens | None], Tensor]:
        """Enqueues the token inputs. Returns a callable that runs the layers, by piecewise graphs of a bucket."""
        ids, max_n_tokens = to_device(step.ids, self._device), int(step.rows.n_tokens.max())
        sequences = () if self.states is None else self._sequences(step, self.states)
        if bucket is None:
            inputs = replace(self._batch.prepare(step.n_rows, ids, max_n_tokens), sequences=sequences)
            return partial(self._decoder, inputs, self.pool)
        self._batch.prepare_static(step.n_rows, ids, max_n_tokens, bucket)
        return partial(piecewise.run, bucket, len(ids), self.pool, sequences)

    def _sequences(self, step: PackedStep, states: CudaStates) -> DeviceSequences:
        """Returns the staged rows, for layers that have states."""
        if step.n_decode == step.n_rows:
            return self._batch.sequences(step.n_decode)
        within = SortedSaves.of(step.plan).within
        arrays = block_arrays(step.rows, step.n_decode, within, states.n_batch_slots)
        prompts = BlockArrays(*(to_device(array, self._device) for array in arrays))
        return self._batch.sequences(step.n_decode, prompts)

    def _last_tokens_attention(self, step: PackedStep) -> LayerAttention:
        """Plans attention of each row's last token.

        The plan overwrites the staged step: call it after all earlier layers' attention is enqueued.
        """
        staged = self._staging.stage()
        self._row_fields.fill(staged, step, step.n_rows)
        decode = self._attention.plan_decode(staged, DecodeRows(step.rows.batch_slots, step.lengths))
        self._staging.send(staged)
        return self._attention.step(decode, None)

    def _stage_padding(self, bucket: int, variant: Variant, *, has_adapters: bool) -> DecodeStep:
        """Stages a step of padding rows, for a graph capture."""
        staged = self._staging.stage()
        self._row_fields.pad(staged, 0, bucket)
        if self._window_fields is not None:
            self._window_fields.fill(staged, None)
        no_rows = np.empty(0, np.int32)
        decode: DecodeStep = self._attention.plan_decode(staged, DecodeRows(no_rows, no_rows), bucket, variant)
        self._staging.send(staged)
        self._plan_adapters(_no_slots(has_adapters), bucket)
        return decode

    def _decode(self, run: Callable[..., Tensor], step: DecodeStep) -> None:
        """Enqueues what a decode graph captures, with ``run`` for the layers: all, or one of each kind."""
        self._batch.update_staged(step.n_rows)
        inputs = self._batch.prepare_decode(step.n_rows)
        states = run(inputs, self.pool, self._attention.step(step, None))
        self._compute_argmax(states, step.n_rows)

    def _compute_argmax(self, last: Tensor, n_rows: int) -> None:
        """Computes each row's logits and argmax token, and stores the token as its batch slot's last one. Ranks
        that do not sample compute their part of the logits.

        Args:
            last: [rows and padding, hidden], states of the rows' last tokens.
            n_rows: without padding.
        """
        self._decoder.logits(last, self._logits[: len(last)])
        if not self.samples:
            return
        outputs = self._outputs(n_rows)
        tokens, finite = outputs.argmax_result
        argmax(
            outputs.logits,
            tokens,
            finite,
            self._scratch[:n_rows],
            batch_slots=self._batch.sampled_slots(n_rows),
            last_tokens=self._batch.last_tokens,
        )

    def _outputs(self, n_rows: int, hidden: Tensor | None = None, last: Tensor | None = None) -> StepOutputs:
        return StepOutputs(self._logits[:n_rows], self._argmax_results[: 2 * n_rows].view(2, -1), hidden, last)


def _no_slots(has_adapters: bool) -> Ints | None:
    """Returns the slots of no token, for a step of padding that is computed with adapters or without."""
    return np.empty(0, np.int32) if has_adapters else None


def _decode_rows(step: PackedStep) -> DecodeRows:
    n, plan = step.n_decode, step.plan
    return DecodeRows(step.rows.batch_slots[:n], step.lengths[:n], plan.shared_runs, plan.runs_id, step.counts)
