"""A layer with a sliding window reads no position, and no block, before its window."""

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from radixkv.checkpoints import Checkpoint
from radixkv.runtime.device.attention.cuda.prefill import pages_behind
from support.device_support import OpenDevice, random_ids, row_of
from support.poison import poison

Get = Callable[[str], Checkpoint]
PAGE, BLOCK, LENGTH = 4, 8, 75
IDS = random_ids(LENGTH, seed=11)
WINDOW = 17
"""Sliding window of all layers of the checkpoint ``mixtral``."""


@pytest.mark.parametrize(
    ("start", "first_read"),
    [
        (LENGTH - 1, 56),  # position 74 sees positions from 58 on, in the block that begins at 56
        (72, 56),
        (40, 24),  # many tokens in one row: the first sees positions from 24 on
    ],
)
def test_blocks_before_the_window_are_not_read(checkpoint: Get, start: int, first_read: int) -> None:
    device = OpenDevice(checkpoint("mixtral"), page_size=PAGE, block_tokens=BLOCK)
    pages = device.pages(LENGTH)
    (expected,) = device.run(row_of(IDS, pages))
    poison(device.pool, pages[: first_read // PAGE])
    (logits,) = device.run(row_of(IDS, pages, start=start, write_start=LENGTH))
    assert torch.equal(logits, expected[start:])
    poison(device.pool, [pages[first_read // PAGE]])
    (logits,) = device.run(row_of(IDS, pages, start=start, write_start=LENGTH))
    assert logits[0].isnan().all()


@pytest.mark.parametrize("start", [LENGTH - 1, 72, 40, 16, 0])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_before_the_window_are_not_read(checkpoint: Get, start: int, page_size: int) -> None:
    """Not even where their block has positions of the window: other requests may have these pages."""
    device = OpenDevice(checkpoint("mixtral"), page_size=page_size)
    pages = device.pages(LENGTH)
    (expected,) = device.run(row_of(IDS, pages))
    n_behind = pages_behind(np.array([start], dtype=np.int32), WINDOW, page_size).item()
    poison(device.pool, pages[:n_behind])
    (logits,) = device.run(row_of(IDS, pages, start=start, write_start=LENGTH))
    assert torch.equal(logits, expected[start:])
    poison(device.pool, [pages[n_behind]])
    (logits,) = device.run(row_of(IDS, pages, start=start, write_start=LENGTH))
    assert logits[0].isnan().all()


def test_pages_behind_a_window_have_none_of_its_positions() -> None:
    """CUDA begins a row of a prompt after them."""
    starts = np.arange(200, dtype=np.int32)
    for window, page_size in product((1, 2, 16, 33), (1, 4, 16)):
        n_behind = pages_behind(starts, window, page_size)
        for start, n in zip(starts.tolist(), n_behind.tolist(), strict=True):
            first_read = max(0, start - window + 1)
            assert n == sum(1 for page in range(start) if (page + 1) * page_size <= first_read)
    assert not pages_behind(starts, None, 4).any()


@pytest.mark.parametrize("distance", [WINDOW, WINDOW + 1])
def test_the_window_counts_the_token_itself(checkpoint: Get, distance: int) -> None:
    """Changing V of a token outside the window does not change the logits; inside it does."""
    device = OpenDevice(checkpoint("mixtral"), page_size=1, block_tokens=BLOCK)
    pages = device.pages(LENGTH)
    device.run(row_of(IDS, pages))
    (before,) = device.run(row_of(IDS, pages, start=LENGTH - 1, write_start=LENGTH))
    device.pool.v[:, pages[LENGTH - distance]] += 1.0
    (after,) = device.run(row_of(IDS, pages, start=LENGTH - 1, write_start=LENGTH))
    assert torch.equal(before, after) == (distance > WINDOW)


@pytest.mark.parametrize("name", ["mistral", "qwen3-biased"])
def test_blocks_of_the_default_size(checkpoint: Get, name: str) -> None:
    """The window is much smaller than a block and sometimes spans two of them."""
    ids = random_ids(530, seed=14)
    device = OpenDevice(checkpoint(name), page_size=16)
    whole = device.pages(len(ids))
    (expected,) = device.run(row_of(ids, whole))
    pages = device.pages(len(ids))
    bounds = [0, 1, 254, 256, 257, 270, 276, 300, 512, 513, 530]
    parts = [device.run(row_of(ids, pages, start=a, stop=b))[0] for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(device.stored(pages, len(ids)), device.stored(whole, len(ids)))
