import pytest
import torch
from torch import Tensor

from radixkv.runtime.device.ops.cpu.agreeing_tiles import agreeing_tiles, cover

SAMPLE = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))


def test_only_sizes_that_agree_with_the_smallest_are_returned() -> None:
    def product(rows: Tensor) -> Tensor:
        return rows * 2 + (1e-6 if len(rows) == 16 else 0.0)

    assert agreeing_tiles(product, SAMPLE, (4, 8, 16, 32)) == (4, 8, 32)


def test_a_product_that_depends_on_the_position_in_the_tile_gets_single_row_tiles() -> None:
    def product(rows: Tensor) -> Tensor:
        return rows + torch.arange(len(rows)).eq(len(rows) - 1)[:, None] * 1e-6

    assert agreeing_tiles(product, SAMPLE, (4, 8, 16, 32)) == (1,)


@pytest.mark.parametrize(
    ("n", "tiles"), [(1, (4,)), (4, (4,)), (5, (8,)), (8, (8,)), (43, (16, 16, 8, 4)), (44, (16, 16, 8, 4))]
)
def test_cover(n: int, tiles: tuple[int, ...]) -> None:
    assert cover(n, (4, 8, 16)) == tiles
