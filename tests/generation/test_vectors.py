"""Tests of embeddings and scores against torch."""

from __future__ import annotations

import pytest
import torch

from radixkv.generation.vectors import embedding, relevance


@pytest.mark.parametrize("dimensions", [None, 1, 5, 16])
@pytest.mark.parametrize("normalizes", [True, False])
def test_an_embedding_has_length_one_unless_it_is_whole_and_keeps_its_length(
    normalizes: bool, dimensions: int | None
) -> None:
    state = torch.randn(16)
    found = torch.from_numpy(embedding(state.numpy().tobytes(), dimensions, normalizes=normalizes).copy())
    part = state[:dimensions]
    whole = torch.nn.functional.normalize(part, dim=0) if normalizes or dimensions is not None else part
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, whole)


def test_a_state_of_zeros_has_no_direction() -> None:
    assert embedding(bytes(16), None, normalizes=True).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("logits", [(0.0, 0.0), (-3.0, 2.5), (40.0, -2.0), (-1e4, 1e4), (1e4, -1e4)])
def test_a_score_is_the_probability_of_yes(logits: tuple[float, float]) -> None:
    expected = torch.tensor(logits, dtype=torch.float64).softmax(0)[1].item()
    assert relevance(torch.tensor(logits).numpy().tobytes()) == pytest.approx(expected, rel=1e-12, abs=1e-300)
