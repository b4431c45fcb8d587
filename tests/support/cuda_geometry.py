"""The GPU for which plans of attention are tested without one."""

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
"""An 8B model's heads on an H200."""
