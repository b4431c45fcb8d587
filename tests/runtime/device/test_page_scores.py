"""The scores of pages, against loops over their tokens, heads and layers."""

from __future__ import annotations

import math

import pytest
import torch

from radixkv.runtime.device.kv_dtype import FP8, LayerScales, quantize
from radixkv.runtime.device.memory import page_scores
from radixkv.runtime.device.memory.page_scores import PageScores
from radixkv.runtime.device.memory.page_shape import LayerPlace, PageLayout, PageShape


def test_a_case_by_hand() -> None:
    """One layer, one head of two dimensions, pages of two tokens: |V| / |K| of 10 / 5 and 3 / 1, then of 0 / 2 and
    1 / 4."""
    k = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0], [4.0, 0.0]]).view(1, 2, 1, 2, 2)
    v = torch.tensor([[6.0, 8.0], [0.0, 3.0], [0.0, 0.0], [0.0, 1.0]]).view(1, 2, 1, 2, 2)
    scores = PageScores([(k, v)], PageLayout.uniform(PageShape(1, 1, 2, 2)))
    assert scores.of(torch.tensor([1, 0])).tolist() == [0.125, 2.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_the_mean_is_over_tokens_heads_and_layers(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two parts: three layers of two heads, the last two with the K and V of one, and a layer of one head."""
    monkeypatch.setattr(page_scores, "_AT_ONCE_BYTES", at_once)
    torch.manual_seed(1)
    n_pages, page_size = 9, 4
    shapes = (PageShape(2, 2, page_size, 16, dtype), PageShape(1, 1, page_size, 32, dtype))
    page = PageLayout(shapes, (LayerPlace(0, 0), LayerPlace(0, 1), LayerPlace(0, 1), LayerPlace(1, 0)))
    scales = [LayerScales(0.5, 2.0), LayerScales(1.0, 0.25), LayerScales(1.0, 0.25), LayerScales(3.0, 1.0)]
    exact = [
        [torch.randn(s.n_layers, n_pages, page_size, s.n_kv_heads, s.head_dim) for _ in range(2)] for s in shapes
    ]
    if dtype == FP8:
        of_layers = [[scales[0], scales[1]], [scales[3]]]
        parts = [
            (
                torch.stack([quantize(layer, one.k) for layer, one in zip(k, of_part, strict=True)]),
                torch.stack([quantize(layer, one.v) for layer, one in zip(v, of_part, strict=True)]),
            )
            for (k, v), of_part in zip(exact, of_layers, strict=True)
        ]
    else:
        parts = [(k.to(dtype), v.to(dtype)) for k, v in exact]
    pages = [7, 0, 3, 3]
    found = PageScores(parts, page, scales if dtype == FP8 else None).of(torch.tensor(pages)).tolist()
    for index, score in zip(pages, found, strict=True):
        means = []
        for k, v in exact:
            for layer in range(len(k)):
                of_tokens = [
                    math.dist(v[layer, index, token, head], [0.0] * v.shape[-1])
                    / math.dist(k[layer, index, token, head], [0.0] * k.shape[-1])
                    for token in range(page_size)
                    for head in range(k.shape[3])
                ]
                means.append(sum(of_tokens) / len(of_tokens))
        expected = sum(means) / len(means)
        assert score == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 2e-2)
    assert found[2] == found[3]


def test_keys_of_zeros_have_finite_scores() -> None:
    zeros = torch.zeros(1, 2, 1, 2, 4)
    scores = PageScores([(zeros, zeros)], PageLayout.uniform(PageShape(1, 1, 2, 4)))
    assert scores.of(torch.tensor([0, 1])).tolist() == [0.0, 0.0]
