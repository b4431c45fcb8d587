"""The tree against its model, on scripts of random verbs."""

import pytest

from support.tree_world import run_script


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_tree_agrees_with_a_dict(page_size: int, seed: int) -> None:
    run_script(seed, 400, page_size)
