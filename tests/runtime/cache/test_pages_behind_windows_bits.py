"""Without the tree, requests of a model with windows in all layers free pages while they run: no bit changes.

Free pages hold NaN, so that a read of one shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv.checkpoints import Checkpoint, resolve
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.cpu_server import CpuServer, Logits, ids, recorded_logits

WINDOW = 20
PROMPTS = {10 * seed: ids(n_tokens, seed) for seed, n_tokens in enumerate((3, 19, 20, 21, 70, 233), start=1)}
N_TOKENS = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(path, model_type="mistral", sliding_window=WINDOW)
    return resolve(str(path))


def answers(checkpoint: Checkpoint, **settings: Any) -> tuple[CpuServer, Logits]:
    server = CpuServer(checkpoint, shares=False, **settings)
    with recorded_logits() as logits:
        for seed, prompt in PROMPTS.items():
            server.add(seed, prompt, N_TOKENS, n=2, prompt_logprobs=1 if seed % 20 else None)
        server.run()
    assert all(output.end_reason == "length" for output in server.outputs.values())
    return server, logits


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> tuple[CpuServer, Logits]:
    """The answers if no page is freed early."""
    return answers(checkpoint, frees_behind=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("page_size", "budget", "n_pages"),
    rest_nightly([(4, 8, 30), (4, 32, 14), (16, 40, 6), (1, 16, 40)], kept=(1,)),
    ids=["long pool", "smallest pool", "pages of 16", "pages of 1"],
)
def test_answers_have_the_same_bits(
    checkpoint: Checkpoint, expected: tuple[CpuServer, Logits], page_size: int, budget: int, n_pages: int
) -> None:
    whole, expected_logits = expected
    server, logits = answers(checkpoint, page_size=page_size, budget=budget, n_pages=n_pages, max_rows=4)
    assert n_pages * page_size < max(map(len, PROMPTS.values()))
    for seed, output in whole.outputs.items():
        assert server.outputs[seed].tokens == output.tokens, seed
    assert logits.keys() == expected_logits.keys()
    for key, row in expected_logits.items():
        assert torch.equal(logits[key], row), key
    assert server.prompt_logprobs == whole.prompt_logprobs
    assert server.cache.n_free == n_pages
