"""A projection of all experts may be one tensor in the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.weights.open import open_weights
from support.checkpoints import edited_tensors, save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, logits_of, random_ids

IDS = random_ids(40, seed=1)
GATE_UP = "model.language_model.layers.2.mlp.experts.gate_up_proj"


def stack_experts(folder: Path) -> None:
    """Stores experts as Transformers holds them in memory, and as Qwen publishes them in 16 bits."""
    with edited_tensors(folder) as tensors:
        stacks: dict[str, dict[int, dict[str, Tensor]]] = {}
        for name in list(tensors):
            if (found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)) is not None:
                stacks.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = tensors.pop(name)
        for name, experts in stacks.items():
            each = [experts[index] for index in range(len(experts))]
            gate_up = [torch.cat([one["gate_proj"], one["up_proj"]]) for one in each]
            tensors[f"{name}.gate_up_proj"] = torch.stack(gate_up)
            tensors[f"{name}.down_proj"] = torch.stack([one["down_proj"] for one in each])


@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3-moe"])
def test_stacks_are_read_as_the_experts_that_they_have(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path, **(CHECKPOINTS | HYBRIDS)[name])
    expected = logits_of(tmp_path, IDS)
    stack_experts(tmp_path)
    assert torch.equal(logits_of(tmp_path, IDS), expected)
    with torch.inference_mode():
        oracle = load_oracle(resolve(str(tmp_path)))(torch.tensor([IDS])).logits[0]
    assert (expected - oracle).abs().mean() < 2e-4


def test_a_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **HYBRIDS["qwen3.5-moe"])
    stack_experts(tmp_path)
    with edited_tensors(tmp_path) as tensors:
        tensors[GATE_UP] = tensors[GATE_UP][:, 1:].contiguous()
    with (
        pytest.raises(CheckpointError, match=rf"{GATE_UP} .* has shape \[5, 47, 48\]; .* calls for \[5, 48, 48\]"),
        open_weights(resolve(str(tmp_path)), load_format="auto", dtype=torch.float32),
    ):
        pass
