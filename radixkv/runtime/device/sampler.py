"""Logits -> token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.runtime.plan import RowSampling

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: SplitMix64, seeded by a mix of ``seed``."""
    return (_mix(_mix(seed) + (index + 1) * _INCREMENT) >> 11) * 2.0**-53


def sample(logits: Tensor, sampling: Sequence[RowSampling]) -> Tensor:
    """One token a row, [rows] int64. A row's token does not depend on the other rows.

    Greedy rows take the first of the largest logits. Others draw from the softmax at their temperature, cut to the
    ``top_k`` likeliest and then to the smallest set of those that reaches ``top_p``.

    Args:
        logits: [rows, vocab], finite.
        sampling: [rows].
    """
    tokens = logits.argmax(-1)
    for plain in (True, False):
        chosen = [i for i, row in enumerate(sampling) if not _greedy(row) and _plain(row) == plain]
        if chosen:
            rows = [sampling[i] for i in chosen]
            tokens[chosen] = _draw(logits[chosen], rows) if plain else _draw_cut(logits[chosen], rows)
    return tokens


def _greedy(row: RowSampling) -> bool:
    return row.temperature == 0.0 or row.top_k == 1


def _plain(row: RowSampling) -> bool:
    return row.top_k <= 0 and row.top_p >= 1.0


def _draw(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    cumulative = _weights(logits, rows).cumsum(-1)
    return _invert(cumulative, cumulative[:, -1:].contiguous(), rows)


def _draw_cut(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    weights = _weights(ordered, rows)
    vocab_size = logits.shape[-1]
    top_k = torch.tensor([row.top_k if row.top_k > 0 else vocab_size for row in rows])[:, None]
    weights.masked_fill_(torch.arange(vocab_size) >= top_k, 0.0)
    cumulative = weights.cumsum(-1)
    wanted = _column([row.top_p for row in rows]) * cumulative[:, -1:]
    last = torch.searchsorted(cumulative, wanted).clamp_(max=vocab_size - 1)
    places = _invert(cumulative, cumulative.gather(1, last), rows)
    return order.gather(1, places[:, None])[:, 0]


def _weights(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Softmax at each row's temperature, not normalised; float64."""
    exact = logits.double()
    exact -= exact.amax(-1, keepdim=True)
    exact /= _column([row.temperature for row in rows])
    return exact.exp_()


def _invert(cumulative: Tensor, total: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """The first place whose cumulative weight exceeds the row's draw from [0, total)."""
    draws = _column([uniform(row.seed, row.index) for row in rows]) * total
    places = torch.searchsorted(cumulative, draws, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(places, last)[:, 0]


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
