"""Fixtures of tests on a CUDA device; without one, the tests are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_support import opened, save_sensitive

from radixkv import LLM


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        pytest.skip(f"needs a CUDA device: {reason}")


@pytest.fixture(scope="module")
def sensitive_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose every token depends on the whole context."""
    return save_sensitive(tmp_path_factory.mktemp("sensitive"))


@pytest.fixture(scope="module")
def alone(sensitive_folder: Path) -> Iterator[LLM]:
    """An engine without the prefix cache, whose answers to single requests others are compared with."""
    with opened(sensitive_folder, enable_prefix_caching=False, max_num_seqs=8, max_num_batched_tokens=4096) as llm:
        yield llm
