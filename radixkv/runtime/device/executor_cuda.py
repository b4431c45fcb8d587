"""Plans in, tokens out, on one GPU: a ``runtime.plan.Executor`` whose steps run beside the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.attention_timer_cuda import AttentionTimer
from radixkv.runtime.device.errors_cuda import Translation
from radixkv.runtime.device.model_runner_cuda import N_TIMES, Outputs, StepRunner
from radixkv.runtime.device.pack_cuda import PackedStep, Packer
from radixkv.runtime.device.sampling.cuda.draw_settings import is_greedy
from radixkv.runtime.device.sampling.cuda.logit_edits import has_edits
from radixkv.runtime.device.sampling.cuda.sampler import CudaSampler, SampledRows, ScoredTokens
from radixkv.runtime.step.plan import RowSampling, Scoring, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.wire import TokenLogprobs

_MAX_SCORED_ROWS = 256
"""Logits of more tokens are computed lot by lot."""


class CudaExecutor:
    """A ``runtime.plan.Executor`` on one GPU.

    ``launch`` enqueues a step on the device's one stream and returns; ``result`` waits for that step alone. What a
    step samples stays on the device for the next one; the host gets a copy.

    Args:
        runner: started.
        packer: of the same sizes.
        sampler: of the same sizes.
        stream: what everything runs on.
    """

    wants_shared_runs = True
    """Rows that share pages may read them together."""

    def __init__(
        self,
        runner: StepRunner,
        packer: Packer,
        sampler: CudaSampler,
        *,
        vocab_size: int,
        stream: torch.cuda.Stream,
    ) -> None:
        self._runner = runner
        self._packer = packer
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._stream = stream
        self._errors = Translation(runner, sampler)

    @property
    def device(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self._stream.device)

    @property
    def dtype(self) -> str:
        """Of weights and pool."""
        return str(self._runner.pool.k.dtype).removeprefix("torch.")

    @property
    def n_pages(self) -> int:
        """Pages in the pool."""
        return self._runner.pool.n_pages

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._vocab_size

    def launch(self, plan: StepPlan) -> CudaStep:
        """Enqueues a step.

        Raises:
            DeviceError: the plan does not fit; or the device has no memory for it, and nothing comes of what was
                enqueued already.
            DeviceLost: the device answers no more.
        """
        step = self._packer.pack(plan)
        with self._errors.of(plan.step), torch.inference_mode(), torch.cuda.stream(self._stream):
            outputs = self._runner.enqueue(step)
            sampled = self._sample(step, outputs)
            scored = [
                (place, scores)
                for place, row in enumerate(plan.rows)
                if row.scoring is not None
                for scores in self._score(row.scoring, int(step.firsts[place]), outputs.hidden)
            ]
            return CudaStep(plan, outputs.report, self._runner.timer, sampled, scored, self._stream, self._errors)

    def close(self) -> None:
        """Gives weights, pool and graphs back to the GPU, for this process and others. Waits for what was launched;
        of a lost device nothing is given back before the process ends."""
        try:
            self._stream.synchronize()
        except torch.AcceleratorError:
            self._errors.keep()
            return
        self._errors.let_go()
        del self._runner, self._sampler
        torch.cuda.empty_cache()

    def _sample(self, step: PackedStep, outputs: Outputs) -> _Sampled | None:
        """Rows whose token is not just the likeliest one, or that ask for more than it."""
        asked = [
            (i, row.sampling)
            for i, row in enumerate(step.plan.rows)
            if row.sampling is not None and _asks_for_more(row.sampling)
        ]
        if not asked:
            return None
        rows, sampling = [i for i, _ in asked], [how for _, how in asked]
        places = torch.tensor(rows, pin_memory=True).to(self._stream.device, non_blocking=True)
        logits = outputs.logits[: step.n_rows]
        greedy, finite = outputs.choice[:, : step.n_rows]
        if len(asked) < step.n_rows:
            logits, greedy, finite = (numbers.index_select(0, places) for numbers in (logits, greedy, finite))
        sampled = self._sampler.sample(logits, step.batch_slots[rows].tolist(), sampling, greedy, finite)
        outputs.choice[0].index_copy_(0, places, sampled.tokens)
        self._runner.keep(places, sampled.tokens)
        reports = any(how.n_logprobs is not None for how in sampling)
        return _Sampled(rows, sampled if reports else None)

    def _score(self, scoring: Scoring, first: int, hidden: Tensor | None) -> Iterator[ScoredTokens]:
        """How likely the tokens were that a row was asked about, lot by lot; ``first`` is where the row begins."""
        assert hidden is not None, "a step with rows to score is no graph"
        targets = np.frombuffer(scoring.targets, dtype="<i4")
        for start in range(0, len(targets), _MAX_SCORED_ROWS):
            lot = targets[start : start + _MAX_SCORED_ROWS]
            logits = self._runner.logits(hidden[first + start : first + start + len(lot)])
            yield self._sampler.score(logits, lot, scoring.n_logprobs)


@dataclass(frozen=True)
class _Sampled:
    rows: list[int]
    """Places in the plan."""
    reports: SampledRows | None
    """Theirs, if one of them asks for log-probabilities."""


class CudaStep:
    """A launched step: a ``runtime.plan.Pending``. Made right behind the step's last kernel."""

    def __init__(
        self,
        plan: StepPlan,
        report: Tensor,
        timer: AttentionTimer,
        sampled: _Sampled | None,
        scored: list[tuple[int, ScoredTokens]],
        stream: torch.cuda.Stream,
        errors: Translation,
    ) -> None:
        self._plan = plan
        self._errors = errors
        self._timer = timer
        self._sampled = sampled
        self._scored = scored
        self._report = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        self._report.copy_(report, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(stream)
        self._memory = (self._report, sampled, scored, self._done)
        errors.hold(self._memory)

    def result(self) -> StepResult:
        """Waits for this step; may be asked again. Raises ``DeviceError`` or ``DeviceLost``."""
        try:
            with self._errors.of(self._plan.step):
                self._done.synchronize()
        except DeviceError:
            self._errors.release(self._memory)
            raise
        self._errors.release(self._memory)
        rows = self._plan.rows
        times, choice = np.split(self._report.numpy(), [N_TIMES])
        tokens, are_finite = choice.reshape(2, -1)[:, : len(rows)]
        finite = are_finite.astype(np.bool_)
        scores: dict[int, list[TokenLogprobs]] = {}
        for row, scored in self._scored:
            found = scored.collect()
            finite[row] &= found is not None
            scores.setdefault(row, []).extend(found or ())
        samples = np.array([row.sampling is not None for row in rows])
        return StepResult(
            tokens=tuple(np.where(finite & samples, tokens, -1).tolist()),
            finite=tuple(finite.tolist()),
            logprobs=self._logprobs(finite),
            scores=tuple(tuple(scores[i]) if i in scores and finite[i] else None for i in range(len(rows)))
            if scores
            else (),
            attention_seconds=self._timer.seconds(times.view(np.int64)),
        )

    def _logprobs(self, finite: NDArray[np.bool_]) -> tuple[TokenLogprobs | None, ...]:
        if self._sampled is None or self._sampled.reports is None:
            return ()
        found = dict(zip(self._sampled.rows, self._sampled.reports.collect(), strict=True))
        return tuple(found.get(row) if finite[row] else None for row in range(len(finite)))


def _asks_for_more(sampling: RowSampling) -> bool:
    """Whether the likeliest token is not all that a row wants to know."""
    return not is_greedy(sampling) or has_edits(sampling) or sampling.n_logprobs is not None
