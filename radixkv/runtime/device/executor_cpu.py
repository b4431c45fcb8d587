"""The CPU as a device: plans in, tokens out, computed by torch."""

from __future__ import annotations

import logging
import os
from collections import deque
from time import perf_counter

import torch
from torch import Tensor

from radixkv.checkpoints import Checkpoint
from radixkv.config import LoadFormat
from radixkv.errors import ConfigError, DeviceError
from radixkv.runtime.device.attention.cpu.base import Attention
from radixkv.runtime.device.attention.cpu.reference import ReferenceAttention
from radixkv.runtime.device.host_memory import require
from radixkv.runtime.device.kv_pool_cpu import KVPool, PageShape, count_pages
from radixkv.runtime.device.model.decoder_cpu import Decoder
from radixkv.runtime.device.pack_cpu import Batch, Batcher, Scored
from radixkv.runtime.device.sampling.cpu.sampler import Sampled, Sampler
from radixkv.runtime.device.weights.weights import Weights, open_weights
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.wire import TokenLogprobs

logger = logging.getLogger(__name__)

_MAX_LOGIT_ROWS = 256
"""Logits of more tokens are computed lot by lot: together they could take more memory than the rest of a step."""


class CpuExecutor:
    """A ``runtime.plan.Executor`` on the CPU.

    ``launch`` packs a plan and queues it; ``result`` computes what is queued, up to and with its own step, so that
    the caller meets the same order of events as with a device that runs beside it.

    In float32 a result does not depend on who else is in a step, on chunks or on hits, to the last bit. In bfloat16
    weights, activations and KV are bfloat16; sums, norms, rotary angles and attention are computed in float32; the
    same holds nearly, but is not promised.

    Memory: the weights, the pool, and a workspace that stops growing at the first step of the largest kind.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        page_size: int,
        max_rows: int,
        max_model_len: int,
        kv_cache_memory_bytes: int,
        max_total_tokens: int | None,
        dtype: str = "auto",
        load_format: LoadFormat = "auto",
    ) -> None:
        """Loads the model and fills the pool with zeros.

        Sets torch's threads, for the whole process, to half of the cores: see decision 5.

        Args:
            max_rows: slots; a plan's rows have slots below it.
            max_total_tokens: the pool in tokens; None lets ``kv_cache_memory_bytes`` decide.
            dtype: ``float32``, ``bfloat16``, or ``auto``, which is float32.
            load_format: ``dummy`` takes random weights and reads no file but ``config.json``.

        Raises:
            CheckpointError: the checkpoint cannot be run.
            ConfigError: a size does not fit the checkpoint or the memory.
        """
        # Before anything is computed: the tiles are chosen by what has the same bits with this many threads.
        torch.set_num_threads(max(1, _n_cores() // 2))
        _check_max_model_len(max_model_len, checkpoint)
        if page_size < 1 or max_rows < 1:
            raise ConfigError(f"page_size {page_size} and max_rows {max_rows} must be at least 1")
        with open_weights(checkpoint, load_format=load_format, dtype=_dtype(dtype)) as weights:
            page, n_pages = _plan_pool(weights, page_size, kv_cache_memory_bytes, max_total_tokens)
            config = weights.config
            self.model = Decoder(weights, max_model_len)
        self.pool = KVPool(page, n_pages)
        windows = [window if window and window < max_model_len else None for window in config.windows]
        self.attention: Attention = ReferenceAttention(self.pool, n_heads=config.n_heads, windows=windows)
        self._batcher = Batcher(
            page_size=page_size, max_rows=max_rows, max_model_len=max_model_len, n_pages=n_pages
        )
        self._vocab_size = config.vocab_size
        self._sampler = Sampler(max_rows, config.vocab_size)
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64)
        self._queue: deque[_Step] = deque()

    @property
    def device(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def dtype(self) -> str:
        """Of weights and pool."""
        return str(self.pool.k.dtype).removeprefix("torch.")

    @property
    def n_pages(self) -> int:
        """Pages in the pool."""
        return self.pool.n_pages

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._vocab_size

    @property
    def wants_shared_runs(self) -> bool:
        """Attention reads each row's pages by themselves."""
        return False

    def launch(self, plan: StepPlan) -> _Step:
        """Queues a step. Raises ``DeviceError`` for a plan that does not fit, which then was not launched."""
        step = _Step(self, plan.step, self._batcher.pack(plan))
        self._queue.append(step)
        return step

    def close(self) -> None:
        """Forgets what is queued, which refers back to this object: all memory goes with it."""
        self._queue.clear()

    def compute_until(self, step: _Step) -> None:
        """Computes the queue's steps in order, until ``step`` is done. A step that fails takes the rest along."""
        while not step.done:
            oldest = self._queue.popleft()
            try:
                with torch.inference_mode():
                    oldest.outcome = self._compute(oldest.batch)
            except Exception as error:  # whatever torch raises is this step's failure
                oldest.outcome = f"step {oldest.number} failed: {type(error).__name__}: {error}"
                logger.exception("step %d failed", oldest.number)
                while self._queue:
                    later = self._queue.popleft()
                    later.outcome = f"step {later.number} was built on step {oldest.number}, which failed"

    def _compute(self, batch: Batch) -> StepResult:
        if batch.copies:
            self.pool.copy(batch.copies)
        ids = batch.ids.clone()
        ids[batch.fed_tokens] = self._last_tokens[batch.fed_slots]
        self.attention.plan(batch)
        attention_seconds = 0.0

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal attention_seconds
            begun = perf_counter()
            attended = self.attention.run(layer, q, k, v)
            attention_seconds += perf_counter() - begun
            return attended

        hidden = self.model(ids, batch.positions, attend)
        last = hidden[batch.last]
        sampled = self._sample(last, batch)
        scores = {scored.row: self._score(hidden, scored) for scored in batch.scored}
        sick = {row for rows in (sampled, scores) for row, outcome in rows.items() if outcome is None}
        finite = [healthy and row not in sick for row, healthy in enumerate(last.isfinite().all(-1).tolist())]
        chosen = [sampled.get(row) if healthy else None for row, healthy in enumerate(finite)]
        asks_logprobs = any(asked is not None and asked.n_logprobs is not None for asked in batch.sampling)
        return StepResult(
            tokens=tuple(-1 if choice is None else choice.token for choice in chosen),
            finite=tuple(finite),
            logprobs=tuple(choice.logprobs if choice else None for choice in chosen) if asks_logprobs else (),
            scores=tuple(scores.get(row) if finite[row] else None for row in range(len(finite))) if scores else (),
            attention_seconds=attention_seconds,
        )

    def _sample(self, last: Tensor, batch: Batch) -> dict[int, Sampled | None]:
        """Row: its token, None if its logits are not finite. The slots' next steps start with these tokens."""
        asked = [(row, sampling) for row, sampling in enumerate(batch.sampling) if sampling is not None]
        sampled: dict[int, Sampled | None] = {}
        for start in range(0, len(asked), _MAX_LOGIT_ROWS):
            rows, sampling = zip(*asked[start : start + _MAX_LOGIT_ROWS], strict=True)
            batch_slots = batch.batch_slots[list(rows)]
            choices = self._sampler.sample(self.model.logits(last[list(rows)]), batch_slots.tolist(), sampling)
            # A step that was launched meanwhile goes on with any token where there is none.
            tokens = [0 if choice is None else choice.token for choice in choices]
            self._last_tokens[batch_slots] = torch.tensor(tokens)
            sampled.update(zip(rows, choices, strict=True))
        return sampled

    def _score(self, hidden: Tensor, scored: Scored) -> tuple[TokenLogprobs, ...] | None:
        """None if not all of the logits are finite."""
        scores: list[TokenLogprobs] = []
        for start in range(0, len(scored.targets), _MAX_LOGIT_ROWS):
            targets = scored.targets[start : start + _MAX_LOGIT_ROWS]
            first = scored.first + start
            some = self._sampler.score(
                self.model.logits(hidden[first : first + len(targets)]), targets, scored.n_logprobs
            )
            if some is None:
                return None
            scores += some
        return tuple(scores)


class _Step:
    """A launched step: a ``runtime.plan.Pending``."""

    def __init__(self, executor: CpuExecutor, number: int, batch: Batch) -> None:
        self._executor = executor
        self.number = number
        self.batch = batch
        self.outcome: StepResult | str | None = None
        """What the step gave, or why it failed. The exception is not kept: its traceback would hold the step's
        tensors in a cycle, and the runtime's loop has no cyclic collector."""

    @property
    def done(self) -> bool:
        return self.outcome is not None

    def result(self) -> StepResult:
        """Computes this step and those before it. Raises ``DeviceError``, also if one before it failed."""
        self._executor.compute_until(self)
        assert self.outcome is not None
        if isinstance(self.outcome, str):
            raise DeviceError(self.outcome)
        return self.outcome


def check_for_cpu(
    checkpoint: Checkpoint,
    *,
    page_size: int,
    max_model_len: int,
    kv_cache_memory_bytes: int,
    max_total_tokens: int | None,
    dtype: str,
) -> None:
    """What a ``CpuExecutor`` refuses and can be known without the weights. Raises as it does."""
    _check_max_model_len(max_model_len, checkpoint)
    with open_weights(checkpoint, load_format="dummy", dtype=_dtype(dtype)) as weights:
        _plan_pool(weights, page_size, kv_cache_memory_bytes, max_total_tokens)


def _check_max_model_len(max_model_len: int, checkpoint: Checkpoint) -> None:
    limit = checkpoint.max_position_embeddings
    if not 1 <= max_model_len <= limit:
        raise ConfigError(f"max_model_len {max_model_len} must be between 1 and the checkpoint's {limit}")


def _dtype(name: str) -> torch.dtype:
    if name not in (choices := {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}):
        raise ConfigError(f"dtype {name!r} is not supported on the CPU; use float32 or bfloat16")
    return choices[name]


def _plan_pool(
    weights: Weights, page_size: int, kv_cache_memory_bytes: int, max_total_tokens: int | None
) -> tuple[PageShape, int]:
    """A page, and how many there will be. Raises ``ConfigError`` if they and the weights do not fit into memory."""
    config = weights.config
    page = PageShape(config.n_layers, config.n_kv_heads, page_size, config.head_dim, weights.dtype)
    n_pages = count_pages(page, kv_cache_memory_bytes, max_total_tokens)
    _require_memory(weights, (n_pages + 1) * page.n_bytes)
    return page, n_pages


def _require_memory(weights: Weights, pool_bytes: int) -> None:
    """Before anything is loaded. Raises ``ConfigError``."""
    is_wide = weights.dtype == torch.float32
    model = f"a model in {'float32' if is_wide else 'bfloat16'}"
    require(weights.peak_bytes, model, f"take a smaller one{', or set dtype to bfloat16' if is_wide else ''}")
    require(
        weights.peak_bytes + pool_bytes,
        f"a KV pool of {pool_bytes} bytes beside {model}, a total",
        "set kv_cache_memory_bytes or max_total_tokens lower, or take a smaller model",
    )


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
