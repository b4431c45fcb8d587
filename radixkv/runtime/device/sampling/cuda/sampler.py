"""Logits -> tokens, and how likely they were, without the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.ops.cuda.argmax import FEW_ROWS, argmax, argmax_scratch
from radixkv.runtime.device.sampling.cuda.draw import draw_listed, draw_open
from radixkv.runtime.device.sampling.cuda.draw_settings import MAX_LISTED, DrawSettings, is_greedy, top_k_of
from radixkv.runtime.device.sampling.cuda.logit_edits import LOT, Edits, has_edits
from radixkv.runtime.device.sampling.cuda.logprobs import Logprobs
from radixkv.runtime.device.transfer_cuda import to_device
from radixkv.runtime.step.plan import History, RowSampling
from radixkv.wire import TokenLogprobs


class SampledRows:
    """A step's tokens on the device, and what the host asked to know of them."""

    def __init__(self, tokens: Tensor, asked: Sequence[int], logprobs: Logprobs | None) -> None:
        self.tokens = tokens
        """[rows] int32; 0 where the row is not finite."""
        self._asked = asked
        self._logprobs = logprobs

    def collect(self) -> list[TokenLogprobs | None]:
        """Row by row; None where not asked for, or the row is not finite. Only when the stream has come so far."""
        found: list[TokenLogprobs | None] = [None] * len(self.tokens)
        if self._logprobs is not None:
            for row, logprobs in zip(self._asked, self._logprobs.collect(), strict=True):
                found[row] = logprobs
        return found


class ScoredTokens:
    """How likely given tokens were, on the way to the host."""

    def __init__(self, logprobs: Logprobs) -> None:
        self._logprobs = logprobs

    def collect(self) -> list[TokenLogprobs] | None:
        """Row by row; None if one is not finite. Only when the stream has come so far."""
        found = self._logprobs.collect()
        known = [logprobs for logprobs in found if logprobs is not None]
        return known if len(known) == len(found) else None


class CudaSampler:
    """Chooses tokens on the device, and keeps there what the slots' requests said, for penalties.

    The order is that of ``device.sampler.Sampler``: bias, bans, penalties, temperature, ``top_k``, ``min_p``,
    ``top_p``. The distribution is the same; the random numbers are others. A row's token has the same bits
    whoever else is in the batch: it depends on the row's logits and settings alone. Of equal logits the smaller id
    is taken first, except that a ``top_k`` above ``MAX_LISTED`` keeps all that are equal to the last one.

    Everything is enqueued on the current stream, and nothing waits.

    Memory, from the start on: that of ``Edits``. A call needs up to 20 kB a row besides.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Fills the device's memory.

        Args:
            max_rows: slots.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._edits = Edits(max_rows, vocab_size, device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles every kernel for logits of this type: seconds, or a moment where they were compiled before.

        All slots are then as new.
        """
        several = torch.zeros(FEW_ROWS + 1, self._vocab_size, dtype=dtype, device=self._device)
        logits = several[:1]
        tokens, finite = torch.ones(2, 1, dtype=torch.int32, device=self._device)
        listed = RowSampling(temperature=1.0, top_k=2, top_p=0.9, seed=0, index=0, n_logprobs=1)
        drawn = replace(listed, top_k=0)
        edits = {"history": History(bytes(4), 1), "presence_penalty": 1.0, "logit_bias": ((0, 1.0),)}
        for row in (listed, drawn, replace(listed, **edits), replace(drawn, **edits)):
            self.sample(logits, [0], [row], tokens, finite)
        for scored in (logits, several):
            self.score(scored, np.zeros(len(scored), dtype=np.int32), 1)
        self._edits.forget()

    def sample(
        self,
        logits: Tensor,
        batch_slots: Sequence[int],
        sampling: Sequence[RowSampling],
        greedy: Tensor,
        finite: Tensor,
    ) -> SampledRows:
        """One token a row. The slot of a row that is not finite keeps the history that it had.

        Args:
            logits: [rows, vocab], any float dtype, rows may be strided; not changed.
            slots: [rows], each once.
            sampling: [rows].
            greedy: [rows] int32, each row's likeliest token, the smallest of equal ones.
            finite: [rows] int32, 1 where all logits are finite, else 0.

        Raises:
            DeviceError: token ids are outside the vocabulary, all of it is banned, or penalties have no history;
                then no slot's history has changed.
        """
        self._edits.adopt(batch_slots, sampling)
        tokens = greedy.clone()
        edited, plain = [], []
        for row, each in enumerate(sampling):
            if has_edits(each):
                edited.append(row)
            elif not is_greedy(each):
                plain.append(row)
        if plain:
            self._draw(logits, plain, plain, sampling, tokens)
        for first in range(0, len(edited), LOT):
            lot = edited[first : first + LOT]
            values = self._edits.apply(
                logits, lot, [batch_slots[row] for row in lot], [sampling[row] for row in lot]
            )
            self._draw(values, range(len(lot)), lot, sampling, tokens)
        tokens.mul_(finite)
        counted = [row for row in edited if sampling[row].has_penalties]
        if counted:
            self._edits.count([batch_slots[row] for row in counted], counted, tokens, finite)
        asked = [(row, each.n_logprobs) for row, each in enumerate(sampling) if each.n_logprobs is not None]
        rows = [row for row, _ in asked]
        logprobs = Logprobs(logits, rows, [n for _, n in asked], tokens, finite) if asked else None
        return SampledRows(tokens, rows, logprobs)

    def score(self, logits: Tensor, targets: NDArray[np.integer], n_logprobs: int) -> ScoredTokens:
        """How likely ``targets`` were, one a row of logits.

        Args:
            logits: [rows, vocab], any float dtype.
            targets: [rows], at least one.
            n_logprobs: how many of the likeliest tokens to list beside each.

        Raises:
            DeviceError: a target is outside the vocabulary.
        """
        if not 0 <= targets.min() <= targets.max() < self._vocab_size:
            raise DeviceError(f"a token to score is not between 0 and {self._vocab_size - 1}")
        n_rows = len(targets)
        greedy, finite = torch.empty(2, n_rows, dtype=torch.int32, device=self._device)
        argmax(logits, greedy, finite, argmax_scratch(n_rows, self._vocab_size, self._device))
        tokens = to_device(targets.astype(np.int32), self._device)
        return ScoredTokens(Logprobs(logits, range(n_rows), [n_logprobs] * n_rows, tokens, finite))

    def _draw(
        self,
        values: Tensor,
        sources: Sequence[int],
        targets: Sequence[int],
        sampling: Sequence[RowSampling],
        tokens: Tensor,
    ) -> None:
        """Rows ``sources`` of ``values`` give ``tokens[targets]``."""
        top_ks = [top_k_of(sampling[row], self._vocab_size) for row in targets]
        listed = [place for place, top_k in enumerate(top_ks) if 0 < top_k <= MAX_LISTED]
        others = [place for place, top_k in enumerate(top_ks) if not 0 < top_k <= MAX_LISTED]
        order = listed + others
        settings = DrawSettings.send(
            [sampling[targets[place]] for place in order],
            [top_ks[place] for place in order],
            [sources[place] for place in order],
            [targets[place] for place in order],
            self._device,
        )
        if listed:
            width = max(top_ks[place] for place in listed)
            draw_listed(values, settings.narrow(0, len(listed)), width, tokens)
        if others:
            draw_open(values, settings.narrow(len(listed), len(order)), tokens)
