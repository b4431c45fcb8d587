"""Which layers a decoder runs so that every kernel of a step was called once."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.checkpoints import resolve
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, OpenDevice

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("grouped", {}, [0]),
        ("opt", {}, [0]),
        ("grouped", {"num_hidden_layers": 1}, []),
        ("qwen3-moe", {}, [0, 1, 2]),
        ("qwen3-moe-alternating", {"use_sliding_window": False}, [0, 1]),
        ("qwen3.5", {"num_hidden_layers": 8}, [0, 2, 3]),
        ("nemotron-h", {}, [0, 1, 2, 3]),
        ("gemma3", {"layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING]}, [0, 1, 2]),
    ],
)
def test_each_pair_of_neighbouring_kinds_is_run(
    tmp_path: Path, name: str, changes: dict[str, object], expected: list[int]
) -> None:
    """Kernels between two mixers depend on the layers before and after."""
    save_checkpoint(tmp_path, **({"num_hidden_layers": 5} | (CHECKPOINTS | HYBRIDS)[name] | changes))
    assert OpenDevice(resolve(str(tmp_path))).model.distinct_mixers == expected
