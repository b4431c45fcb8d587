"""Products and MLPs with adapters: each row as its own adapter makes it, to the bit whatever is beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from radixkv.runtime.device.adapters.layers import LoraLinear, LoraMlp, LoraPair
from radixkv.runtime.device.adapters.rows import StepRows
from radixkv.runtime.device.ops.cpu.layers import Linear, Mlp, RowTiles, activate
from radixkv.runtime.device.weights.layer_weights import LinearWeights, MlpWeights
from radixkv.runtime.step.plan import Row

N_IN, N_OUT, TILES = 24, 40, RowTiles()


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row(n_tokens: int, adapter: str = "") -> Row:
    return Row(0, 0, n_tokens, None, 0, 0, (), None, adapter=adapter)


def product(n_out: int, n_in: int, seed: int) -> Linear:
    return Linear(LinearWeights(random(n_out, n_in, seed=seed)), TILES)


def pair(columns: slice, n_in: int, rank: int, seed: int) -> tuple[LoraPair, Tensor, Tensor]:
    a, b = random(rank, n_in, seed=seed), random(columns.stop - columns.start, rank, seed=seed + 1)
    return LoraPair(columns, *(Linear(LinearWeights(one), TILES) for one in (a, b)), 0.5), a, b


def linear_of(step: StepRows) -> tuple[LoraLinear, dict[str, Tensor], Tensor]:
    """Returns a product with two adapters, what each adds to its weights, and these."""
    weight, pairs, added = random(N_OUT, N_IN, seed=0), dict[str, list[LoraPair]](), dict[str, Tensor]()
    for adapter, columns, rank in (("x", (slice(0, 24), slice(24, 40)), 3), ("y", (slice(24, 40),), 8)):
        added[adapter] = torch.zeros_like(weight)
        for number, one in enumerate(columns):
            lora, a, b = pair(one, N_IN, rank, seed=10 * rank + number)
            pairs.setdefault(adapter, []).append(lora)
            added[adapter][one] += 0.5 * (b @ a)
    return LoraLinear(Linear(LinearWeights(weight), TILES), pairs, step), added, weight


ROWS = [row(5, "x"), row(1), row(300, "y"), row(40), row(7, "x"), row(3, "z")]
"""Of ``z`` the product has no pair: the adapter changes other modules."""


def spans(rows: Sequence[Row]) -> list[slice]:
    ends = torch.tensor([one.n_tokens for one in rows]).cumsum(0).tolist()
    return [slice(end - one.n_tokens, end) for one, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("in_out", [False, True])
def test_each_row_has_the_product_of_its_adapter(in_out: bool) -> None:
    step = StepRows()
    linear, added, weight = linear_of(step)
    step.plan(ROWS)
    x = random(356, N_IN, seed=1)
    out = torch.empty(356, N_OUT) if in_out else None
    y = linear(x, out)
    assert out is None or y is out
    for one, span in zip(ROWS, spans(ROWS), strict=True):
        merged = weight + added.get(one.adapter, torch.zeros(()))
        torch.testing.assert_close(y[span], x[span] @ merged.T, atol=1e-4, rtol=1e-4)
        step.plan([one])
        assert torch.equal(linear(x[span]), y[span]), "alone, to the bit"


def test_an_mlp_computes_each_row_with_its_adapter_in_chunks() -> None:
    step = StepRows()
    inner = N_OUT // 2
    gate_up, added, weight = linear_of(step)
    down_weight = random(N_IN, inner, seed=5)
    lora, a, b = pair(slice(0, N_IN), inner, 4, seed=6)
    down = LoraLinear(Linear(LinearWeights(down_weight), TILES), {"x": [lora]}, step)
    mlp = LoraMlp(gate_up, down, lambda x: activate("silu", x), step)
    plain = Mlp(MlpWeights(LinearWeights(weight), LinearWeights(down_weight)), TILES, "silu")
    step.plan(ROWS)
    assert len(step.chunks) == 2
    x = random(356, N_IN, seed=1)
    y = mlp(x)
    assert torch.equal(mlp(x, torch.empty(356, N_IN)), y)
    for one, span in zip(ROWS, spans(ROWS), strict=True):
        merged = Mlp(
            MlpWeights(
                LinearWeights(weight + added.get(one.adapter, torch.zeros(()))),
                LinearWeights(down_weight + (0.5 * (b @ a) if one.adapter == "x" else 0.0)),
            ),
            TILES,
            "silu",
        )
        torch.testing.assert_close(y[span], merged(x[span]), atol=1e-3, rtol=1e-3)
        step.plan([one])
        assert torch.equal(mlp(x[span]), y[span]), "alone, to the bit"
    step.plan([row(356)])
    assert torch.equal(mlp(x), plain(x)), "without adapters it is the device's own"


def test_chunks_divide_the_rows_of_a_step() -> None:
    step = StepRows()
    step.plan([row(250), row(20, "x"), row(260, "y"), row(10, "x")])
    whole = {name: rows.tolist() for name, rows in step.whole.indices.items()}
    assert whole == {"x": [*range(250, 270), *range(530, 540)], "y": list(range(270, 530))}
    assert [(chunk.first, chunk.n_rows) for chunk in step.chunks] == [(0, 256), (256, 256), (512, 28)]
    parts = {
        name: [
            one + chunk.first for chunk in step.chunks for one in chunk.indices.get(name, torch.empty(0)).tolist()
        ]
        for name in whole
    }
    assert parts == whole
    assert list(step.chunks[0].indices) == ["x"]
