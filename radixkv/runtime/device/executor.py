"""Plans in, tokens out: the device as the runtime's loop sees it."""

from __future__ import annotations

import logging
import os
from collections import deque

import torch

from radixkv.checkpoints import Checkpoint
from radixkv.errors import ConfigError, DeviceError
from radixkv.runtime.device.attention.base import Attention
from radixkv.runtime.device.attention.reference import ReferenceAttention
from radixkv.runtime.device.batch import Batch, Batcher
from radixkv.runtime.device.kvpool import KVPool, count_pages
from radixkv.runtime.device.models.decoder import Decoder
from radixkv.runtime.device.models.weights import load_weights, read_config
from radixkv.runtime.device.sampler import sample
from radixkv.runtime.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


class CpuExecutor:
    """A ``runtime.plan.Executor`` on the CPU, in float32.

    ``launch`` packs a plan and queues it; ``result`` computes what is queued, up to and with its own step, so that
    the caller meets the same order of events as with a device that runs beside it.

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
    ) -> None:
        """Loads the model and fills the pool with zeros.

        Sets torch's threads, for the whole process, to half of the cores: see decision 5.

        Args:
            max_rows: slots; a plan's rows have slots below it.
            max_total_tokens: the pool in tokens; None lets ``kv_cache_memory_bytes`` decide.

        Raises:
            CheckpointError: the checkpoint cannot be run.
            ConfigError: a size does not fit the checkpoint or the memory.
        """
        # Before anything is computed: the tiles are chosen by what has the same bits with this many threads.
        torch.set_num_threads(max(1, _n_cores() // 2))
        limit = checkpoint.max_position_embeddings
        if not 1 <= max_model_len <= limit:
            raise ConfigError(f"max_model_len {max_model_len} must be between 1 and the checkpoint's {limit}")
        if page_size < 1 or max_rows < 1:
            raise ConfigError(f"page_size {page_size} and max_rows {max_rows} must be at least 1")
        config = read_config(checkpoint)
        n_pages = count_pages(
            n_layers=config.n_layers,
            n_kv_heads=config.n_kv_heads,
            page_size=page_size,
            head_dim=config.head_dim,
            memory_bytes=kv_cache_memory_bytes,
            max_total_tokens=max_total_tokens,
        )
        self.model = Decoder(config, load_weights(checkpoint.folder, config), max_model_len)
        self.pool = KVPool(
            n_layers=config.n_layers,
            n_pages=n_pages,
            n_kv_heads=config.n_kv_heads,
            page_size=page_size,
            head_dim=config.head_dim,
        )
        self.attention: Attention = ReferenceAttention(self.pool, n_heads=config.n_heads)
        self._batcher = Batcher(
            page_size=page_size, max_rows=max_rows, max_model_len=max_model_len, n_pages=n_pages
        )
        self._vocab_size = config.vocab_size
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64)
        self._queue: deque[_Step] = deque()

    @property
    def n_pages(self) -> int:
        """Pages in the pool."""
        return self.pool.n_pages

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._vocab_size

    def launch(self, plan: StepPlan) -> _Step:
        """Queues a step. Raises ``DeviceError`` for a plan that does not fit, which then was not launched."""
        step = _Step(self, plan.step, self._batcher.pack(plan))
        self._queue.append(step)
        return step

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
        ids = batch.ids.clone()
        ids[batch.fed_tokens] = self._last_tokens[batch.fed_slots]
        self.attention.plan(batch)
        hidden = self.model(ids, batch.positions, self.attention.run)[batch.last]
        finite = hidden.isfinite().all(-1)
        tokens = torch.full_like(batch.slots, -1)
        asked = [(row, sampling) for row, sampling in enumerate(batch.sampling) if sampling is not None]
        if asked:
            rows = torch.tensor([row for row, _ in asked])
            logits = self.model.logits(hidden[rows])
            # NaN and infinities show in a row's extremes, which cost a tenth of looking at each number.
            usable = finite[rows] & logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
            if not usable.all():
                logits = logits.masked_fill(~usable[:, None], 0.0)
            sampled = sample(logits, [sampling for _, sampling in asked])
            self._last_tokens[batch.slots[rows]] = sampled
            tokens[rows] = sampled.masked_fill(~usable, -1)
            finite[rows] = usable
        return StepResult(tokens=tuple(tokens.tolist()), finite=tuple(finite.tolist()))


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


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
