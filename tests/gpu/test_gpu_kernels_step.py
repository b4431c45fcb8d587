"""The kernels over a step's small integers, against loops in Python."""

from __future__ import annotations

from kernel_support import on_kernels

pytestmark = on_kernels
