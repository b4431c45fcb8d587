"""The GPU geometry with which attention plans are tested without a GPU."""

from __future__ import annotations

import torch

from radixkv.runtime.device.attention.cuda.base import AttentionShape, Geometry

PAGE = 16
SHAPE = AttentionShape(
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    page_size=PAGE,
    dtype=torch.bfloat16,
    scale=128**-0.5,
    kv_dtype=torch.bfloat16,
)
"""The heads of an 8B model."""
H200 = Geometry(SHAPE, large_tile=128, n_processors=132, shared_bytes=228 << 10)
"""The heads of an 8B model on an H200."""
