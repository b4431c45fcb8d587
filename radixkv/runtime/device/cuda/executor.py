"""The GPU executor: step plans in, tokens out, asynchronous to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.adapters.cuda.loaded import CudaAdapters
from radixkv.runtime.device.attention.base import longest_window
from radixkv.runtime.device.cuda.errors import CudaErrorConverter
from radixkv.runtime.device.cuda.model_runner import ModelRunner, StepOutputs
from radixkv.runtime.device.cuda.pooled_rows import PooledRows
from radixkv.runtime.device.cuda.results import step_result
from radixkv.runtime.device.kv_dtype import kv_dtype_name
from radixkv.runtime.device.memory.copy_threads import CopyThreads
from radixkv.runtime.device.memory.cuda.array_copies import to_device, to_host
from radixkv.runtime.device.memory.cuda.copy_pace import CopyPace
from radixkv.runtime.device.memory.cuda.copy_stream import CopyStream
from radixkv.runtime.device.memory.cuda.driver import CudaDriver
from radixkv.runtime.device.memory.cuda.host_slots import CudaHostSlots
from radixkv.runtime.device.memory.cuda.host_states import CudaHostStates
from radixkv.runtime.device.memory.cuda.slab_pool import CudaSlabPool
from radixkv.runtime.device.memory.page_scores import PageScores
from radixkv.runtime.device.memory.state_slots import StateSlots
from radixkv.runtime.device.pack import PackedStep, Packer
from radixkv.runtime.device.sampling.cuda.sampler import CudaSampler, PromptLogprobs, SampledRows
from radixkv.runtime.device.sampling.logit_edits import has_edits
from radixkv.runtime.device.sampling.row_sampling import is_greedy
from radixkv.runtime.step.adapters import DeviceAdapters
from radixkv.runtime.step.executor import PageOrigin
from radixkv.runtime.step.page_copier import SlotPart
from radixkv.runtime.step.plan import RowSampling, Scoring, StepPlan
from radixkv.runtime.step.result import StepResult, TokenMasks
from radixkv.runtime.step.window_pool import WindowPool
from radixkv.wire.messages import TokenLogprobs

MAX_PROMPT_LOGPROB_ROWS = 256
"""Prompt logprobs are computed for this many tokens at a time, which bounds the memory of their logits."""


class CudaExecutor:
    """A ``runtime.step.executor.Executor`` on one GPU.

    ``launch`` enqueues a step on the device's only stream and returns; ``result`` waits for that step alone.
    Sampled tokens stay on the device, where the next step reads them; the host gets a copy. A step with masked rows
    is sampled by ``finish``, which enqueues that while the device still computes the layers.

    Args:
        runner: with an open pool.
        packer: for the runner's row, token and page limits.
        sampler: for the runner's number of batch slots.
        vocab_size: token ids are below this.
        stream: all work is enqueued here.
        kv_scales: of a quantized pool, as ``kv_dtype.scales_text`` returns them; empty for another.
        windows: [layers], how many positions a token attends to; None for all.
        window_pool: of the pool, if that has window pages.
        adapters: those that rows may ask for; None: rows have none.
        page_scores: of the pool; None: of this one nobody asks for any.
    """

    n_ranks = 1
    uses_shared_runs = True
    """Plans should list shared runs: attention can read their pages once for many rows."""
    splits_drafts = True
    """A draft is a row to attention, which takes the place of another."""
    is_asynchronous = True
    """The GPU computes launched steps while the host does other things."""

    def __init__(
        self,
        runner: ModelRunner,
        packer: Packer,
        sampler: CudaSampler,
        *,
        vocab_size: int,
        stream: torch.cuda.Stream,
        kv_scales: str = "",
        windows: Sequence[int | None] = (None,),
        window_pool: WindowPool | None = None,
        adapters: CudaAdapters | None = None,
        page_scores: PageScores | None = None,
    ) -> None:
        pool = runner.pool
        self.device = torch.cuda.get_device_name(stream.device)
        self.dtype = str(runner.dtype).removeprefix("torch.")
        self.kv_dtype = kv_dtype_name(pool.dtype)
        self.n_pages = pool.n_pages
        self.n_states = None if runner.states is None else runner.states.n_tree_slots
        self.vocab_size = vocab_size
        self.window = longest_window(windows)
        self.has_windows = any(window is not None for window in windows)
        self.window_pool = window_pool
        self.adapters: DeviceAdapters | None = adapters
        self._adapters = adapters
        self._page_scores = page_scores
        self._window_entries = None if window_pool is None else packer.window_entries(window_pool)
        self.page_origin = PageOrigin(
            device="cuda",
            processor="compute capability {}.{}".format(*torch.cuda.get_device_capability(stream.device)),
            torch_version=torch.__version__,
            layout=pool.layout,
            scales=kv_scales,
        )
        self._runner = runner
        self._packer = packer
        self._sampler = sampler
        self._stream = stream
        self._errors = CudaErrorConverter(runner, sampler, adapters)
        self._last_step: torch.cuda.Event | None = None

    def launch(self, plan: StepPlan) -> LaunchedCudaStep:
        """Enqueues a step, and its sampling if no row is masked.

        Raises:
            DeviceError: the plan does not fit, or the device has too little memory for it; results of kernels that
                were enqueued already are discarded.
            DeviceLost: the device no longer responds.
        """
        step = self._packer.pack(plan)
        if self._runner.states is not None:
            self._runner.states.check(plan)
        if self._window_entries is not None:
            self._window_entries.check(plan)
        with self._errors.convert(plan.step), torch.inference_mode(), torch.cuda.stream(self._stream):
            begun = torch.cuda.Event(enable_timing=True)
            begun.record(self._stream)
            outputs = self._runner.enqueue(step)
            prompt_logprobs = list(self._score_prompts(step, outputs.hidden))
            pooled = None
            if self._runner.samples and any(row.pooling is not None for row in plan.rows):
                pooled = PooledRows(step, outputs)
            scores = self._score_pages(plan)
            launched = LaunchedCudaStep(self, step, begun, outputs, prompt_logprobs, pooled, scores)
            if not plan.is_masked:
                launched.sampled = self._sample_step(launched, None)
            return launched

    def sample(self, launched: LaunchedCudaStep, masks: TokenMasks | None) -> SampledCudaStep:
        """Enqueues the sampling of a step. Raises ``DeviceError`` or ``DeviceLost``."""
        with self._errors.convert(launched.step.plan.step), torch.inference_mode(), torch.cuda.stream(self._stream):
            return self._sample_step(launched, masks)

    def open_copier(self, host_memory_bytes: int, part: SlotPart | None = None) -> CopyThreads:
        """See ``Executor.open_copier``. The host memory is pinned, and becomes usable in the background.

        Takes 64 MiB of the GPU's memory, or four pages if those are more.
        """
        driver, pace = CudaDriver(), CopyPace(self._is_stepping)
        # A thread begins with GPU 0, which is another one for most ranks.
        begin_thread = partial(torch.cuda.set_device, self._stream.device)
        pool, states = self._runner.pool, self._runner.states
        if isinstance(pool, CudaSlabPool):
            slots = CudaHostSlots(pool, host_memory_bytes, driver, pace, part, slabs=pool.slabs)
            return CopyThreads(slots, windows=slots.windows, begin_thread=begin_thread)
        if states is None:
            slots = CudaHostSlots(pool, host_memory_bytes, driver, pace, part)
            return CopyThreads(slots, begin_thread=begin_thread)
        state_slots = StateSlots(
            state_bytes=states.n_bytes,
            n_states=states.n_tree_slots,
            page_bytes=pool.page_bytes,
            n_pages=pool.n_pages,
            n_bytes=host_memory_bytes,
            part=part,
        )
        slots = CudaHostSlots(pool, host_memory_bytes, driver, pace, part, state_slots)
        streams = [CopyStream(self._stream.device) for _ in range(2)]
        host_states = CudaHostStates(states, state_slots, slots.memory, driver, pace, *streams)
        return CopyThreads(slots, host_states, begin_thread=begin_thread)

    def check(self) -> None:
        """Does nothing: a lost GPU is noticed in steps alone."""

    def close(self) -> None:
        """Frees weights, pool and graphs for this process and others, after waiting for launched steps. The memory
        of a lost device is freed only when the process ends."""
        try:
            self._stream.synchronize()
        except torch.AcceleratorError:
            self._errors.never_free()
            return
        self._errors.release_all()
        if self._adapters is not None:
            self._adapters.close()
        # The packer refers to the runner, and the scores of pages refer to the pool.
        del self._runner, self._packer, self._sampler, self._page_scores
        torch.cuda.empty_cache()

    def _is_stepping(self) -> bool:
        """Whether a launched step has not finished. Safe in any thread."""
        return self._last_step is not None and not self._last_step.query()

    def _sample_step(self, launched: LaunchedCudaStep, masks: TokenMasks | None) -> SampledCudaStep:
        sampled = self._sample(launched.step, launched.outputs, masks)
        self._runner.broadcast_last_tokens()
        step = SampledCudaStep(launched, sampled, self._stream, self._errors, has_result=self._runner.samples)
        self._last_step = step.done
        return step

    def _sample(self, step: PackedStep, outputs: StepOutputs, masks: TokenMasks | None) -> _SamplerRows | None:
        """Samples the rows of the packed step that need more than their argmax token; None if there are none."""
        if not self._runner.samples or not any(
            row.sampling is not None and _needs_sampler(row.sampling) for row in step.plan.rows
        ):
            return None
        sampled_rows = [
            (i, sampling)
            for i, sampling in enumerate(step.plan.samplings())
            if sampling is not None and _needs_sampler(sampling)
        ]
        positions, sampling = [i for i, _ in sampled_rows], [row_sampling for _, row_sampling in sampled_rows]
        rows = positions if step.results is None else step.results[positions].tolist()
        row_indices = torch.tensor(rows, pin_memory=True).to(self._stream.device, non_blocking=True)
        logits = outputs.logits[: step.n_rows]
        greedy, finite = outputs.argmax_result[:, : step.n_rows]
        if len(sampled_rows) < step.n_rows:
            logits, greedy, finite = (values.index_select(0, row_indices) for values in (logits, greedy, finite))
        masked = None if masks is None else _in_order_of(positions, masks)
        sampled = self._sampler.sample(
            logits, step.rows.batch_slots[rows].tolist(), sampling, greedy, finite, masked
        )
        outputs.argmax_result[0].index_copy_(0, row_indices, sampled.tokens)
        self._runner.set_last_tokens(row_indices, sampled.tokens)
        has_logprobs = any(row_sampling.n_logprobs is not None for row_sampling in sampling)
        return _SamplerRows(positions, sampled if has_logprobs else None)

    def _score_pages(self, plan: StepPlan) -> Tensor | None:
        """Enqueues the scores of the pages that rows ask for; None if there are none. Raises ``DeviceError``."""
        pages = plan.scored_pages()
        if not pages:
            return None
        if self._page_scores is None:
            raise DeviceError(f"step {plan.step}: the pages of this pool have no scores")
        return self._page_scores.of(to_device(np.array(pages, np.int64), self._stream.device))

    def _score_prompts(self, step: PackedStep, hidden: Tensor | None) -> Iterator[tuple[int, PromptLogprobs]]:
        """Yields the index of each row of the plan that scores its prompt, with each chunk of its logprobs.

        Other ranks than rank 0 compute their part of the logits.
        """
        if not any(row.scoring for row in step.plan.rows):
            return
        for index, (row, first) in enumerate(zip(step.plan.rows, step.plan.first_positions(), strict=True)):
            if row.scoring is not None:
                for logprobs in self._prompt_logprobs(row.scoring, int(step.rows.firsts[first]), hidden):
                    yield index, logprobs

    def _prompt_logprobs(self, scoring: Scoring, first: int, hidden: Tensor | None) -> Iterator[PromptLogprobs]:
        """Yields the prompt logprobs of one row in chunks of ``MAX_PROMPT_LOGPROB_ROWS`` tokens.

        Args:
            scoring: the row's targets.
            first: index of the row's first token in ``hidden``.
            hidden: [tokens, hidden], last states of the step's tokens.
        """
        assert hidden is not None, "steps with prompt logprobs run without a decode graph"
        targets = np.frombuffer(scoring.targets, dtype="<i4")
        for start in range(0, len(targets), MAX_PROMPT_LOGPROB_ROWS):
            chunk = targets[start : start + MAX_PROMPT_LOGPROB_ROWS]
            logits = self._runner.logits(hidden[first + start : first + start + len(chunk)])
            if self._runner.samples:
                yield self._sampler.score(logits, chunk, scoring.n_logprobs)


@dataclass(frozen=True)
class _SamplerRows:
    """What the sampler did in one step."""

    positions: list[int]
    """Indices of the sampled positions in the plan."""
    logprobs: SampledRows | None
    """The sampler's result; None if no row reports logprobs."""


@dataclass(eq=False)
class LaunchedCudaStep:
    """A launched step: a ``runtime.step.result.LaunchedStep``."""

    executor: CudaExecutor
    step: PackedStep
    begun: torch.cuda.Event
    """Is reached when the device begins with the step."""
    outputs: StepOutputs
    prompt_logprobs: list[tuple[int, PromptLogprobs]]
    pooled: PooledRows | None
    """None if no row reports its last position, and on ranks other than rank 0."""
    page_scores: Tensor | None = None
    """[scored pages] float32; None if no row asks for any."""
    sampled: SampledCudaStep | None = None
    """The sampled step, if it was sampled at its launch."""

    def sample(self, masks: TokenMasks | None) -> SampledCudaStep:
        """Enqueues the sampling, unless that is done. Raises ``DeviceError`` or ``DeviceLost``."""
        return self.sampled or self.executor.sample(self, masks)


class SampledCudaStep:
    """A sampled step: a ``runtime.step.result.SampledStep``. Constructing it enqueues the copy of its results.

    Args:
        launched: the step.
        sampled: what the sampler did; None: nothing.
        stream: of the executor.
        errors: of the executor.
        has_result: whether this rank samples; if not, the result is empty.
    """

    def __init__(
        self,
        launched: LaunchedCudaStep,
        sampled: _SamplerRows | None,
        stream: torch.cuda.Stream,
        errors: CudaErrorConverter,
        *,
        has_result: bool,
    ) -> None:
        self._has_result = has_result
        self._step = launched.step
        self._begun = launched.begun
        self._errors = errors
        self._sampled = sampled
        self._prompt_logprobs = launched.prompt_logprobs
        self._pooled = launched.pooled
        argmax_result = launched.outputs.argmax_result
        self._argmax_result = torch.empty(argmax_result.shape, dtype=argmax_result.dtype, pin_memory=True)
        self._argmax_result.copy_(argmax_result, non_blocking=True)
        self._page_scores = None if launched.page_scores is None else to_host(launched.page_scores)
        self.done = torch.cuda.Event(enable_timing=True)
        """Is reached when the device has finished the step."""
        self.done.record(stream)
        self._memory = (
            self._argmax_result,
            self._page_scores,
            sampled,
            self._prompt_logprobs,
            self._pooled,
            self._begun,
            self.done,
        )
        errors.hold(self._memory)

    @property
    def is_done(self) -> bool:
        """Whether the device has finished the step, or has failed; ``result`` raises the error then."""
        try:
            return bool(self.done.query())
        except RuntimeError:
            return True

    def result(self) -> StepResult:
        """Waits for this step; may be called again. Raises ``DeviceError`` or ``DeviceLost``."""
        try:
            with self._errors.convert(self._step.plan.step):
                self.done.synchronize()
                device_seconds = self._begun.elapsed_time(self.done) / 1e3
        except DeviceError:
            self._errors.release(self._memory)
            raise
        self._errors.release(self._memory)
        if not self._has_result:
            return StepResult((), ())
        sampled, results = self._argmax_result.numpy(), self._step.results
        return step_result(
            self._step.plan,
            sampled if results is None else sampled[:, results],
            self._logprobs(),
            [(row, chunk.collect()) for row, chunk in self._prompt_logprobs],
            device_seconds,
            None if self._pooled is None else self._pooled.collect(),
            () if self._page_scores is None else tuple(self._page_scores.tolist()),
        )

    def _logprobs(self) -> dict[int, TokenLogprobs | None]:
        """Returns the logprobs by sampled position; empty if no row reports them."""
        if self._sampled is None or self._sampled.logprobs is None:
            return {}
        return dict(zip(self._sampled.positions, self._sampled.logprobs.collect(), strict=True))


def _in_order_of(positions: list[int], masks: TokenMasks) -> TokenMasks:
    """Returns the masks with indices into ``positions``, which contain all masked ones."""
    indices = {position: index for index, position in enumerate(positions)}
    return TokenMasks(tuple(indices[position] for position in masks.positions), masks.bits)


def _needs_sampler(sampling: RowSampling) -> bool:
    """Whether a row needs more than its argmax token."""
    return not is_greedy(sampling) or has_edits(sampling) or sampling.n_logprobs is not None
