from dataclasses import replace

import pytest
import torch
from torch import Tensor

from radixkv.runtime.device.sampler import sample, uniform
from radixkv.runtime.plan import RowSampling

N = 4000


def row(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, index: int = 0) -> RowSampling:
    return RowSampling(temperature, top_k, top_p, seed, index)


def expected_probabilities(logits: Tensor, settings: RowSampling) -> Tensor:
    """The textbook way: cut to top_k, softmax, drop the tail beyond top_p, normalise."""
    scaled = logits.double() / settings.temperature
    if settings.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(min(settings.top_k, len(scaled))).values[-1], -torch.inf)
    probabilities = scaled.softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    dropped = ordered.cumsum(0) - ordered >= settings.top_p
    probabilities[order[dropped]] = 0.0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "settings",
    [
        row(),
        row(temperature=0.5),
        row(temperature=3.0),
        row(top_k=5),
        row(top_p=0.7),
        row(temperature=1.5, top_k=8, top_p=0.9),
        row(top_p=1e-6),
        row(top_k=1000),
    ],
)
def test_frequencies_are_the_probabilities(settings: RowSampling) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    tokens = sample(logits.expand(N, -1), [replace(settings, seed=9, index=i) for i in range(N)])
    counts = torch.bincount(tokens, minlength=40).double()
    expected = expected_probabilities(logits, settings) * N
    assert (counts[expected == 0] == 0).all()
    common = expected >= 5
    chi_square = ((counts - expected)[common].square() / expected[common]).sum()
    degrees = int(common.sum())
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(64, 501, generator=torch.Generator().manual_seed(4))
    kinds = [row(temperature=0.0), row(), row(top_k=7), row(0.7, 0, 0.8), row(1.3, 20, 0.95), row(top_k=1)]
    settings = [replace(kinds[i % len(kinds)], seed=i * 31, index=i % 5) for i in range(64)]
    together = sample(logits, settings)
    for i in range(64):
        assert sample(logits[i : i + 1], settings[i : i + 1])[0] == together[i]
    assert torch.equal(sample(logits[17:40], settings[17:40]), together[17:40])
    assert torch.equal(sample(logits.flip(0), settings[::-1]).flip(0), together)


def test_the_draw_depends_on_seed_and_index() -> None:
    draws = {uniform(seed, index) for seed in (0, 1, 2, (1 << 63) - 1) for index in range(100)}
    assert len(draws) == 400
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(sum(draws) / 400 - 0.5) < 0.05
    assert uniform(5, 6) == uniform(5, 6)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 100)
    logits[1, 40] = logits[1, 60] = 1.0
    assert sample(logits, [row(temperature=0.0), row(top_k=1), row(temperature=0.0)]).tolist() == [0, 40, 0]


@pytest.mark.parametrize("settings", [row(temperature=1e-30), row(temperature=5e-324), row(top_p=5e-324)])
def test_extreme_settings_take_the_likeliest(settings: RowSampling) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5))
    assert sample(logits, [settings]).tolist() == logits.argmax(-1).tolist()


def test_large_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 3e38]])
    drawn = {int(sample(logits, [row(seed=seed)])[0]) for seed in range(30)}
    assert drawn == {0, 3}
