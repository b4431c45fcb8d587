"""CUDA's decoder in float32, as an oracle: what a user cannot open, because attention's kernels have 16 bits only.

16 bits hide errors below a hundredth. In float32 everything but attention is the product's own, and must agree with
Transformers up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import opened
from torch import Tensor

from radixkv import LLM
from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.cuda import preflight
from support.reference_attention import ReferenceAttention


@contextmanager
def opened_in_float32(model: Path | str, **settings: Any) -> Iterator[LLM]:
    """Opens a model on CUDA in float32, without graphs, with heads of any power of two."""
    # Imported here, because it imports Triton, which is not installed where these tests are skipped.
    from radixkv.runtime.device.attention.cuda import shaped
    from radixkv.runtime.device.cuda import factory as factory_cuda

    def attention(
        shape: AttentionShape,
        windows: Sequence[int | None],
        *,
        device: torch.device,
        sinks: Sequence[Tensor | None],
        **_: object,
    ) -> ReferenceAttention:
        return ReferenceAttention(shape, windows, device=device, sinks=sinks)

    with pytest.MonkeyPatch.context() as patch:
        for module in (preflight, factory_cuda):
            patch.setattr(module, "choose_dtype", lambda setting, config: torch.float32)
        patch.setattr(preflight, "check_model", lambda config: None)
        patch.setattr(factory_cuda, "not_compiled", lambda *_: [])
        patch.setattr(shaped, "PagedAttention", attention)
        with opened(model, dtype="auto", enforce_eager=True, **settings) as llm:
            yield llm
