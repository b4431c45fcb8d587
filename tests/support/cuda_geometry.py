"""The GPU geometry with which attention plans are tested without a GPU."""

from __future__ import annotations

from radixkv.runtime.device.attention.cuda.decode_plan import Geometry

PAGE = 16
H200 = Geometry(
    n_heads=32,
    n_kv_heads=8,
    page_size=PAGE,
    token_bytes=4096,
    small_tile=16,
    large_tile=128,
    n_processors=132,
    shared_bytes=228 << 10,
    head_dim=128,
)
"""The heads of an 8B model on an H200."""
