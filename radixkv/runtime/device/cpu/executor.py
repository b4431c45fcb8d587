"""The executor that runs step plans on the CPU with torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from radixkv.checkpoints import Checkpoint
from radixkv.errors import ConfigError, DeviceError
from radixkv.processes.cores import n_cores
from radixkv.runtime.device.adapters.base_model import BaseModel
from radixkv.runtime.device.adapters.loaded import LoadedAdapters
from radixkv.runtime.device.adapters.operations import LoraOperations
from radixkv.runtime.device.adapters.rows import StepRows
from radixkv.runtime.device.adapters.targets import target_shapes
from radixkv.runtime.device.attention.base import longest_window
from radixkv.runtime.device.attention.cpu.base import Attention
from radixkv.runtime.device.attention.cpu.paged import PagedAttention
from radixkv.runtime.device.collectives import Collectives, OneRank, SummingCollectives
from radixkv.runtime.device.cpu.persistent_batch import PersistentBatch
from radixkv.runtime.device.cpu.window_tables import WindowTables
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.kv_dtype import choose_kv_dtype, kv_dtype_name, scales_text
from radixkv.runtime.device.memory.copy_threads import CopyThreads
from radixkv.runtime.device.memory.cpu.host_slots import CpuHostSlots, CpuHostWindows
from radixkv.runtime.device.memory.cpu.host_states import CpuHostStates
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.device.memory.cpu.recurrent_states import RecurrentStates
from radixkv.runtime.device.memory.cpu.slab_pool import SlabPool
from radixkv.runtime.device.memory.page_scores import PageScores
from radixkv.runtime.device.memory.page_shape import PageLayout, count_pages
from radixkv.runtime.device.memory.slab_shape import open_slabs
from radixkv.runtime.device.memory.state_size import all_states_bytes, count_states
from radixkv.runtime.device.memory.state_slots import StateSlots
from radixkv.runtime.device.memory_check import require_memory
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.base import Operations, TokenSpan
from radixkv.runtime.device.ops.cpu.operations import CpuOperations
from radixkv.runtime.device.ops.summed import Summed, SummedExperts, SummedOperations
from radixkv.runtime.device.pack import Ints, PackedStep, Packer
from radixkv.runtime.device.sampling.cpu import SampledToken, Sampler
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.shards import Shard
from radixkv.runtime.device.weights.weights import Weights
from radixkv.runtime.step.adapters import DeviceAdapters
from radixkv.runtime.step.executor import PageOrigin
from radixkv.runtime.step.page_copier import SlotPart
from radixkv.runtime.step.plan import RowSampling, Scoring, StepPlan
from radixkv.runtime.step.result import StepResult, TokenMasks
from radixkv.wire.messages import Pooling, TokenLogprobs

logger = logging.getLogger(__name__)

_MAX_LOGIT_ROWS = 256
"""Maximum rows of logits computed at once: more could take more memory than the rest of a step."""


class CpuExecutor:
    """An ``Executor`` on the CPU.

    ``launch`` packs a plan and queues it, and ``finish`` keeps its masks. ``result`` computes the queued steps up
    to and including its own, so that callers see the same order of events as with an asynchronous device.

    In float32 results are bitwise independent of the other rows in a step, of chunking and of cache hits. In
    bfloat16 weights, activations and KV are bfloat16, while sums, norms, rotary angles and attention are computed
    in float32; results are then nearly, but not guaranteed to be, independent of these.

    Memory: the weights, the pool, and a workspace that reaches its final size with the first step of maximum size.
    """

    device = "cpu"
    n_ranks = 1
    is_asynchronous = False
    splits_drafts = False
    uses_shared_runs = False
    """This attention finds shared pages by itself."""

    def __init__(
        self, checkpoint: Checkpoint, settings: DeviceSettings, collectives: SummingCollectives | None = None
    ) -> None:
        """Loads the model and allocates a zeroed KV pool.

        Sets the number of torch threads of the whole process to half of the cores, divided by the ranks; see
        docs/decisions/0005-threads-on-the-cpu.md.

        Args:
            checkpoint: checkpoint to run.
            settings: all of the device. A ``dtype`` of ``auto`` is float32.
            collectives: of this rank; None: it computes the model alone.

        Raises:
            CheckpointError: the checkpoint cannot be run.
            ConfigError: a size does not fit the checkpoint or the memory.
        """
        # Must come before any computation: which tile sizes give equal bits depends on the number of threads.
        self._collectives: Collectives = collectives or OneRank()
        self._n_threads = max(1, n_cores() // 2 // self._collectives.size)
        torch.set_num_threads(self._n_threads)
        page_size, max_rows, max_model_len = settings.page_size, settings.max_num_seqs, settings.max_model_len
        if page_size < 1 or max_rows < 1:
            raise ConfigError(f"page_size {page_size} and max_num_seqs {max_rows} must be at least 1")
        shard = None if collectives is None else Shard(collectives.rank, collectives.size)
        dtype = _dtype(settings.dtype)
        with open_weights(checkpoint, load_format=settings.load_format, dtype=dtype, shard=shard) as weights:
            page, n_pages = _plan_pool(weights, settings)
            if shard is None:  # with ranks all of them were checked together, before any took memory
                _check_memory(weights, page, n_pages, settings)
            config = weights.config
            kv_scales = None if page.dtype == weights.dtype else weights.kv_scales()
            cpu_operations = CpuOperations(config, max_model_len)
            operations: Operations = cpu_operations
            self._adapter_rows: StepRows | None = None
            loaded: LoadedAdapters | None = None
            if settings.has_adapters:
                self._adapter_rows = StepRows()
                operations = with_adapters = LoraOperations(
                    cpu_operations, target_shapes(config), weights.dtype, self._adapter_rows
                )
                model = BaseModel.of_checkpoint(checkpoint, shard)
                loaded = LoadedAdapters(with_adapters, model, weights.dtype, max_rank=settings.max_lora_rank)
            if collectives is not None:
                sum_parts = collectives.sum
                operations = SummedOperations(
                    operations,
                    lambda part, _: Summed(part, sum_parts),
                    lambda part, _: SummedExperts(part, sum_parts),
                    operations.head,
                )
            self.model = Decoder(weights, operations, kv_scales)
            self.adapters: DeviceAdapters | None = loaded
            if loaded is not None:
                loaded.load(settings.adapters)
            self.dtype = str(weights.dtype).removeprefix("torch.")
        states = self.n_states = None
        if config.recurrent is not None:
            self.n_states = count_states(config.recurrent, weights.dtype, settings)
            states = RecurrentStates(config.recurrent, max_rows, self.n_states, weights.dtype)
        windows = config.windows_within(max_model_len)
        slabs = open_slabs(page, windows, n_pages, settings)
        self.window_pool = self._window_tables = None
        if slabs is None:
            self.pool: KVPool | SlabPool = KVPool(page, n_pages, states)
        else:
            self.pool, self.window_pool, n_pages = SlabPool(slabs), slabs.pool, slabs.n_pages
            self._window_tables = WindowTables(max_rows=max_rows, max_model_len=max_model_len, page_size=page_size)
        self._page_scores = PageScores(self.pool.parts, page, kv_scales) if isinstance(self.pool, KVPool) else None
        self._states = states
        self.window = longest_window(windows)
        self.has_windows = any(window is not None for window in windows)
        self.attention: Attention = PagedAttention(
            self.pool,
            n_heads=config.n_heads,
            windows=windows,
            scale=config.attention_scale,
            sinks=self.model.sinks,
            kv_scales=kv_scales,
        )
        self._batch = PersistentBatch(max_rows=max_rows, max_model_len=max_model_len, page_size=page_size)
        known = {} if loaded is None else loaded.sizes
        self._packer = Packer(settings, n_pages, max_tokens=None, adapters=known)
        pool = self.window_pool
        self._window_entries = None if pool is None else self._packer.window_entries(pool)
        self.kv_dtype = kv_dtype_name(page.dtype)
        self.n_pages = n_pages
        self.vocab_size = config.vocab_size
        # The bits depend on instruction sets and threads: both decide how products are split into tiles.
        self.page_origin = PageOrigin(
            device=self.device,
            processor=f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
            torch_version=torch.__version__,
            layout=f"k v, {page}" if slabs is None else f"k v, {slabs}",
            scales=scales_text(page.dtype, kv_scales or ()),
        )
        self._sampler = Sampler(max_rows, config.vocab_size)
        self._queue: deque[_Step] = deque()

    def launch(self, plan: StepPlan) -> _Step:
        """Queues a step. Raises ``DeviceError`` for an invalid plan, which is then not queued."""
        packed = self._packer.pack(plan)
        if self._states is not None:
            self._states.check(plan)
        if self._window_entries is not None:
            self._window_entries.check(plan)
        step = _Step(self, plan.step, packed)
        self._queue.append(step)
        return step

    def open_copier(self, host_memory_bytes: int, part: SlotPart | None = None) -> CopyThreads:
        """See ``Executor.open_copier``."""
        if isinstance(self.pool, SlabPool):
            assert self.window_pool is not None
            slots = CpuHostSlots(self.pool, host_memory_bytes, part)
            return CopyThreads(slots, windows=CpuHostWindows(self.pool, slots, self.window_pool.pages_per_slab))
        if self._states is None:
            return CopyThreads(CpuHostSlots(self.pool, host_memory_bytes, part))
        state_slots = StateSlots(
            state_bytes=self._states.n_bytes,
            n_states=self._states.n_tree_slots,
            page_bytes=self.pool.page_bytes,
            n_pages=self.pool.n_pages,
            n_bytes=host_memory_bytes,
            part=part,
        )
        slots = CpuHostSlots(self.pool, host_memory_bytes, part, n_state_bytes=state_slots.n_bytes)
        states = CpuHostStates(self._states, state_slots, slots.state_memory)
        return CopyThreads(slots, states)

    def check(self) -> None:
        """Does nothing: this device is lost in steps alone."""

    def close(self) -> None:
        """Drops the queued steps. They refer back to this executor, so its memory is freed with them."""
        self._queue.clear()

    def compute_until(self, step: _Step) -> None:
        """Computes queued steps in order until ``step`` is done. If one fails, all queued after it fail too."""
        torch.set_num_threads(self._n_threads)  # an engine with another number of ranks may have set it
        while not step.is_done:
            oldest = self._queue.popleft()
            try:
                with torch.inference_mode():
                    oldest.outcome = self._compute(oldest.packed, oldest.masks)
            except Exception as error:  # any exception fails this step
                oldest.outcome = f"step {oldest.number} failed: {type(error).__name__}: {error}"
                logger.exception("step %d failed", oldest.number)
                while self._queue:
                    later = self._queue.popleft()
                    later.outcome = f"step {later.number} depends on step {oldest.number}, which failed"

    def _compute(self, packed: PackedStep, masks: TokenMasks | None) -> StepResult:
        begun = perf_counter()
        if packed.plan.copies:
            self.pool.copy(packed.plan.copies)
        self._batch.update(packed)
        spans = self._batch.spans(packed)
        window_spans = None
        if self._window_tables is not None and isinstance(self.pool, SlabPool):
            self.pool.copy_windows(packed.plan.window_copies)
            self._window_tables.update(packed.plan)
            window_spans = self._window_tables.spans(packed, spans)
        self.attention.plan(spans, window_spans)
        sequences: tuple[TokenSpan, ...] = ()
        if self._states is not None:
            self._states.load(packed.plan)
            sequences = self._states.token_spans(packed.plan)
        inputs = self._batch.inputs(packed, sequences)
        if self._window_tables is not None:
            inputs = replace(inputs, in_windows=self._window_tables.inputs(packed, inputs))
        if self._adapter_rows is not None:
            self._adapter_rows.plan(packed.plan.rows)
        hidden = self.model(inputs, self.pool, self.attention)
        last = hidden[torch.from_numpy(packed.sampled)]
        positions = [(index, one) for index, row in enumerate(packed.plan.rows) for one in row.samplings()]
        sampled: dict[int, SampledToken | None] = {}
        if self._collectives.rank == 0:
            sampled = self._sample(last, positions, packed.rows.batch_slots, masks)
        self._collectives.broadcast(self._batch.last_tokens)
        if self._collectives.rank:
            return StepResult((), ())
        prompt = {
            index: self._prompt_logprobs(hidden, row.scoring, int(packed.rows.firsts[index]))
            for index, row in enumerate(packed.plan.rows)
            if row.scoring is not None
        }
        firsts = packed.plan.first_positions()
        pooled = {
            index: self._pooled(last[firsts[index]], row.pooling)
            for index, row in enumerate(packed.plan.rows)
            if row.pooling is not None
        }
        are_finite = last.isfinite().all(-1).tolist()
        not_finite = {row for row, outcome in prompt.items() if outcome is None}
        not_finite |= {row for row, values in pooled.items() if not values.isfinite().all()}
        for position, (row, _) in enumerate(positions):
            if not are_finite[position] or sampled.get(position, ()) is None:
                not_finite.add(row)
        finite = [row not in not_finite for row in range(packed.n_rows)]
        chosen = [sampled.get(position) if finite[row] else None for position, (row, _) in enumerate(positions)]
        has_logprobs = any(
            row.sampling is not None and row.sampling.n_logprobs is not None for row in packed.plan.rows
        )
        return StepResult(
            tokens=tuple(-1 if choice is None else choice.token for choice in chosen),
            finite=tuple(finite),
            logprobs=tuple(choice.logprobs if choice else None for choice in chosen) if has_logprobs else (),
            prompt_logprobs=tuple(prompt.get(row) if finite[row] else None for row in range(len(finite)))
            if prompt
            else (),
            pooled=tuple(
                pooled[row].numpy().tobytes() if row in pooled and finite[row] else None
                for row in range(len(finite))
            )
            if pooled
            else (),
            device_seconds=perf_counter() - begun,
            page_scores=self._score_pages(packed.plan),
        )

    def _score_pages(self, plan: StepPlan) -> tuple[float, ...]:
        """Returns ``StepResult.page_scores``."""
        pages = plan.scored_pages()
        if not pages:
            return ()
        if self._page_scores is None:
            raise DeviceError(f"step {plan.step}: pages of a model with window pages have no scores")
        return tuple(self._page_scores.of(torch.tensor(pages)).tolist())

    def _sample(
        self,
        last: Tensor,
        positions: Sequence[tuple[int, RowSampling | None]],
        batch_slots: Ints,
        masks: TokenMasks | None,
    ) -> dict[int, SampledToken | None]:
        """Samples the token of each position that has sampling settings; stores it as its batch slot's last one.

        After a row with drafts the stored token is one of several; the next row brings its own.

        Args:
            last: [sampled positions, hidden], their hidden states.
            positions: [sampled positions], each with its row.
            batch_slots: [rows].
            masks: of the step's masked rows.

        Returns:
            Token by sampled position; None if the logits are not finite.
        """
        sampled_positions = [(n, row, one) for n, (row, one) in enumerate(positions) if one is not None]
        bits = {} if masks is None else dict(zip(masks.positions, masks.bits, strict=True))
        sampled: dict[int, SampledToken | None] = {}
        for start in range(0, len(sampled_positions), _MAX_LOGIT_ROWS):
            indices, rows, sampling = zip(*sampled_positions[start : start + _MAX_LOGIT_ROWS], strict=True)
            slots = batch_slots[list(rows)].tolist()
            choices = self._sampler.sample(
                self.model.logits(last[list(indices)]).float(),
                slots,
                sampling,
                [bits.get(index) for index in indices] if bits else None,
            )
            # A step that is already queued needs some token to continue with, even after a failed row.
            tokens = [0 if choice is None else choice.token for choice in choices]
            self._batch.last_tokens[slots] = torch.tensor(tokens)
            sampled.update(zip(indices, choices, strict=True))
        return sampled

    def _pooled(self, last: Tensor, pooling: Pooling) -> Tensor:
        """Returns in float32 what a row reports of its last position, whose hidden state is ``last``."""
        if not pooling.token_ids:
            return last.float()
        return self.model.logits(last[None])[0, list(pooling.token_ids)].float()

    def _prompt_logprobs(
        self, hidden: Tensor, scoring: Scoring, first_token: int
    ) -> tuple[TokenLogprobs, ...] | None:
        """Returns a row's prompt logprobs, None if not all logits are finite.

        Args:
            hidden: [tokens, hidden], of the step.
            scoring: the prompt logprobs that the row requests.
            first_token: index of the row's first token among the step's tokens; it predicts the first target.
        """
        logprobs: list[TokenLogprobs] = []
        all_targets = np.frombuffer(scoring.targets, dtype="<i4")
        for start in range(0, len(all_targets), _MAX_LOGIT_ROWS):
            targets = all_targets[start : start + _MAX_LOGIT_ROWS]
            first = first_token + start
            chunk = self._sampler.score(
                self.model.logits(hidden[first : first + len(targets)]).float(), targets, scoring.n_logprobs
            )
            if chunk is None:
                return None
            logprobs += chunk
        return tuple(logprobs)


class _Step:
    """A launched step: a ``LaunchedStep``, then a ``SampledStep``."""

    def __init__(self, executor: CpuExecutor, number: int, packed: PackedStep) -> None:
        self._executor = executor
        self.number = number
        self.packed = packed
        self.masks: TokenMasks | None = None
        self.outcome: StepResult | str | None = None
        """Result of the step, or the text of its failure; None until it was computed.

        The exception itself is not stored: its traceback would keep the step's tensors in a reference cycle, and
        the runtime loop runs without the cyclic garbage collector.
        """

    @property
    def is_done(self) -> bool:
        """Whether the step is computed: by ``result``, or by that of a later step."""
        return self.outcome is not None

    def sample(self, masks: TokenMasks | None) -> _Step:
        """Keeps the masks until the step is computed."""
        self.masks = masks
        return self

    def result(self) -> StepResult:
        """Computes this step and all queued before it. Raises ``DeviceError`` if this or an earlier one failed."""
        self._executor.compute_until(self)
        assert self.outcome is not None
        if isinstance(self.outcome, str):
            raise DeviceError(self.outcome)
        return self.outcome


def check_for_cpu(checkpoint: Checkpoint, settings: DeviceSettings) -> None:
    """Runs the checks of ``CpuExecutor`` that need no weights, and refuses to quantize weights.

    Raises:
        CheckpointError: ``config.json`` is invalid or not supported.
        ConfigError: a size does not fit the checkpoint or the memory.
    """
    n_ranks = settings.tensor_parallel_size
    with open_weights(
        checkpoint,
        load_format="dummy",
        dtype=_dtype(settings.dtype),
        quantization=settings.quantization,
        shard=None if n_ranks == 1 else Shard(0, n_ranks),
    ) as weights:
        _check_memory(weights, *_plan_pool(weights, settings), settings, n_ranks=n_ranks)


def _dtype(name: str) -> torch.dtype:
    if name not in (choices := {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}):
        raise ConfigError(f"dtype {name!r} is not supported on the CPU; use float32 or bfloat16")
    return choices[name]


def _plan_pool(weights: Weights, settings: DeviceSettings) -> tuple[PageLayout, int]:
    """Returns the page layout and the number of pages. Raises ``ConfigError`` for a pool without a page."""
    config = weights.config
    assert settings.kv_cache_memory_bytes is not None, "the pool on the CPU has a size"
    dtype = choose_kv_dtype(settings.kv_cache_dtype, weights.dtype)
    page = PageLayout.of(config, settings.page_size, dtype)
    n_pages = count_pages(page, settings.kv_cache_memory_bytes, settings.max_total_tokens)
    return page, n_pages


def _check_memory(
    weights: Weights, page: PageLayout, n_pages: int, settings: DeviceSettings, *, n_ranks: int = 1
) -> None:
    """Raises ``ConfigError`` if weights, states and pool of all ranks do not fit into memory.

    It is called before anything is loaded.
    """
    pool_bytes = n_ranks * (n_pages + 1) * page.n_bytes
    weights_bytes = n_ranks * weights.peak_bytes
    weights_bytes += n_ranks * sum(adapter.n_values for adapter in settings.adapters) * weights.dtype.itemsize
    if (recurrent := weights.config.recurrent) is not None:
        max_rows = settings.max_num_seqs
        states_bytes = n_ranks * all_states_bytes(recurrent, weights.dtype, settings)
        require_memory(
            weights_bytes + states_bytes,
            f"states of {states_bytes} bytes for max_num_seqs {max_rows} and the prefix cache beside the model, a "
            "total",
            "set max_num_seqs or state_memory_bytes lower, or use a smaller model",
        )
        weights_bytes += states_bytes
    is_float32 = weights.dtype == torch.float32
    model = f"a model in {'float32' if is_float32 else 'bfloat16'}"
    require_memory(weights_bytes, model, f"use a smaller model{', or set dtype to bfloat16' if is_float32 else ''}")
    require_memory(
        weights_bytes + pool_bytes,
        f"a KV pool of {pool_bytes} bytes beside {model}, a total",
        "set kv_cache_memory_bytes or max_total_tokens lower, or use a smaller model",
    )
