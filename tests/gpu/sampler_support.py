"""Shared support for tests of the GPU's sampler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from kernel_support import DEVICE
from msgspec.structs import replace
from torch import Tensor

from radixkv.runtime.device.sampling.cuda.sampler import CudaSampler
from radixkv.runtime.step.plan import History, RowSampling
from radixkv.runtime.step.result import TokenMasks
from radixkv.wire.messages import TokenLogprobs

VOCAB = 9001
"""Size of a row in three parts, the last of them short."""
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
DRAWN = replace(GREEDY, temperature=1.0)


def history(prompt: Sequence[int], answer: Sequence[int] = ()) -> History:
    return History(array("i", [*prompt, *answer]).tobytes(), len(prompt))


def normal(n_rows: int, *, size: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(n_rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def peaked(seed: int = 0, *, n_peaks: int = 40, height: float = 12.0) -> Tensor:
    """Returns [VOCAB] logits with most of the weight on a few tokens, and some on all others."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=generator)
    peaks = torch.randperm(VOCAB, generator=generator)[:n_peaks]
    logits[peaks] += height - 4.0 * torch.rand(n_peaks, generator=generator)
    return logits


def make(n_rows: int, size: int = VOCAB) -> CudaSampler:
    return CudaSampler(n_rows, size, torch.device(DEVICE))


def sample(
    logits: Tensor,
    rows: Sequence[RowSampling],
    sampler: CudaSampler | None = None,
    batch_slots: Sequence[int] | None = None,
    masks: TokenMasks | None = None,
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Samples one step and checks that logits are unchanged. Tokens are -1 for rows that are not finite."""
    on_device = logits.to(DEVICE)
    finite = logits.isfinite().all(-1)
    greedy = torch.where(finite, logits.float().argmax(-1), 0).int().to(DEVICE)
    sampler = sampler or make(len(rows), logits.shape[1])
    slots = batch_slots or range(len(rows))
    sampled = sampler.sample(on_device, slots, rows, greedy, finite.int().to(DEVICE), masks)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(on_device.cpu().view(torch.uint8), logits.view(torch.uint8))
    tokens = sampled.tokens.tolist()
    assert all(0 <= token < logits.shape[1] for token in tokens)
    assert not any(token for token, is_finite in zip(tokens, finite.tolist(), strict=True) if not is_finite)
    return [
        token if is_finite else -1 for token, is_finite in zip(tokens, finite.tolist(), strict=True)
    ], sampled.collect()
