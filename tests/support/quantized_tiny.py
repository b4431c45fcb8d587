"""Writes the embedded model in each format of quantized weights, rounded to nearest, for ``bench/tiny_scores.py``.

Groups have 128 inputs, and blocks 128 × 128 weights: the sizes of published checkpoints, which CUDA multiplies as
they are. Run it from the repository's root:

    PYTHONPATH=tests python -m support.quantized_tiny FOLDER
    python -m bench.tiny_scores --model FOLDER/tiny-awq --compare 0
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from radixkv.checkpoints import resolve
from support.quantized_checkpoints import (
    FORMATS,
    Quantize,
    awq,
    fp8_blocks,
    gptq,
    packed_int4,
    quantize_matrices,
    save_stored,
)

GROUP = 128


def variants() -> dict[str, tuple[Quantize, dict[str, Any]]]:
    """Returns what quantizes a matrix, and the ``quantization_config``, by the name of a variant."""
    int4_settings = FORMATS["int4 32"][1]
    (group,) = int4_settings["config_groups"].values()
    groups = {"group_0": group | {"weights": group["weights"] | {"group_size": GROUP}}}
    return {
        "fp8-channels": FORMATS["fp8 channels"],
        "fp8-tensor": FORMATS["fp8 tensor"],
        "fp8-blocks": (
            partial(fp8_blocks, block=(GROUP, GROUP)),
            FORMATS["fp8 blocks"][1] | {"weight_block_size": [GROUP, GROUP]},
        ),
        "awq": (partial(awq, group=GROUP), FORMATS["awq"][1] | {"group_size": GROUP}),
        "gptq": (partial(gptq, group=GROUP), FORMATS["gptq"][1] | {"group_size": GROUP}),
        "int4": (partial(packed_int4, group=GROUP), int4_settings | {"config_groups": groups}),
    }


def save_variants(folder: Path) -> None:
    """Saves ``tiny-awq`` and the other variants, with the tokenizer, as folders in ``folder``."""
    source = resolve("tiny").folder
    config = json.loads((source / "config.json").read_text())
    tensors = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    matrices = {name for name, tensor in tensors.items() if ".layers." in name and tensor.ndim == 2}
    for name, (quantize, settings) in variants().items():
        stored, _ = quantize_matrices(tensors, matrices, quantize)
        save_stored(folder / f"tiny-{name}", stored, config, settings)
        for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / file, folder / f"tiny-{name}")


if __name__ == "__main__":
    save_variants(Path(sys.argv[1]))
