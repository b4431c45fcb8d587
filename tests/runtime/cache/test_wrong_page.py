"""The sensitive checkpoint notices one wrong page, so equal outputs of a test prove that its pages were right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from radixkv.checkpoints import resolve
from support.cpu_server import CpuServer

N_PAGES = 125
PAGE_SIZE = 16


@pytest.mark.nightly
def test_one_wrong_page_changes_nearly_every_output(sensitive: Path) -> None:
    server = CpuServer(resolve(str(sensitive)), n_pages=384, page_size=PAGE_SIZE, budget=2048, max_model_len=3072)

    def tokens_after(prompt: list[int]) -> list[int]:
        server.serve(0, prompt, 32, temperature=0.0, ignore_eos=True)
        return server.outputs[0].tokens

    rng = random.Random(3)
    n_changed = n_pairs = 0
    for _ in range(3):
        server.cache.flush()
        prompt = [rng.randrange(300, 4000) for _ in range(PAGE_SIZE * N_PAGES)]
        expected = tokens_after(prompt)
        assert tokens_after(prompt) == expected
        assert server.outputs[0].n_cached == len(prompt) - 1
        pages = server.cached_pages(prompt)
        for index in (0, 1, 40, 62, 90, 123):
            with server.swapped_pages({pages[index]: pages[(index + 31) % N_PAGES]}):
                n_changed += tokens_after(prompt) != expected
            n_pairs += 1
        assert tokens_after(prompt) == expected
    assert n_changed >= 0.9 * n_pairs
