"""The memory that graphs take, which is counted before the KV pool gets the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import opened, save

from radixkv.runtime.device.cuda import factory
from radixkv.runtime.device.cuda.model_runner import ModelRunner

MIB = 1 << 20
SIZES = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("has_adapters", [False, True])
def test_graphs_take_no_more_than_was_counted(
    has_adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes memory in pieces of 2 MiB, some of which it keeps of graphs that were dropped."""
    counted, taken = list[int](), list[int]()
    count = factory._graph_bytes

    def counting(*arguments: Any) -> int:
        taken.clear()
        counted.append(count(*arguments))
        taken.clear()
        return counted[-1]

    for name in ("capture", "capture_piecewise"):
        capture = getattr(ModelRunner, name)

        def measured(self: ModelRunner, sizes: Any, capture: Any = capture) -> int:
            before = free_bytes()
            n_graphs: int = capture(self, sizes)
            taken.append(before - free_bytes())
            return n_graphs

        monkeypatch.setattr(ModelRunner, name, measured)
    monkeypatch.setattr(factory, "_graph_bytes", counting)
    with opened(save(tmp_path), attention_backend="triton", enable_lora=has_adapters, **SIZES):
        pass
    assert len(taken) == 2, "all decode graphs, and all piecewise graphs"
    print(f"graphs take {sum(taken) / MIB:.0f} MiB, counted were {counted[0] / MIB:.0f}")
    assert sum(taken) <= counted[0]
