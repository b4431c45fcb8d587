"""Tests of the CUDA device: collected everywhere, skipped with the reason where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        pytest.skip(f"needs a CUDA device: {reason}")
