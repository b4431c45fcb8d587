"""Times of the kernels of gated delta nets on a GPU, in the shape of a layer of Qwen3.5-9B.

One JSON line for each kernel and each number of rows: the median replay of a CUDA graph of many calls, divided by
their number. Calls alternate among states and inputs that together do not fit the GPU's cache. ``layer`` is the
whole delta net but for its projections; other lines are its parts. ``tb_per_s`` counts each byte that must move
once. For prompts ``share_of_step`` is the time of 24 layers divided by that of the model's products at 600 TFLOP/s.

    python bench/delta_nets.py --output-file bench/results/delta_nets.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from kernels import Case, line_of, time_us
from result_lines import add_gpu_flags, report, script_parser
from torch import Tensor

from gpu import gpu_provenance
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import BlockArrays, DeviceSequences, LayerStates
from radixkv.runtime.device.ops.cuda.delta_net.blocks import block_bytes, block_parts
from radixkv.runtime.device.ops.cuda.delta_net.convolution import convolve
from radixkv.runtime.device.ops.cuda.delta_net.gated_norm import gated_norm
from radixkv.runtime.device.ops.cuda.delta_net.layer import GatedDeltaNet
from radixkv.runtime.device.ops.cuda.delta_net.scan import scan_blocks
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_arrays
from radixkv.runtime.device.ops.cuda.delta_net.step import step_tokens
from radixkv.runtime.device.ops.cuda.layers import Linear
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.device.weights.layer_weights import LinearWeights, RecurrentWeights

CONFIG = RecurrentConfig(frozenset(range(24)), 16, 32, 128, 128, 4)
DECODE_ROWS = (1, 8, 32, 64, 128, 256)
PROMPTS = ((1, 64), (1, 512), (1, 2048), (1, 8192), (8, 1024), (64, 128))
"""Rows of a step, and tokens of each."""
MODEL_PARAMETERS, PRODUCT_FLOPS = 8.95e9, 600e12
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


@dataclass(frozen=True)
class Layer:
    """A layer with random weights, states of its own, and one step's tensors."""

    projected: Tensor
    convolved: Tensor
    out: Tensor
    weights: RecurrentWeights
    states: LayerStates
    sequences: DeviceSequences

    @classmethod
    def of(cls, n_decode: int, n_prompts: int, n_tokens: int) -> Layer:
        """Returns one for rows of one token, or for prompts of ``n_tokens`` each."""
        n_rows, total = n_decode + n_prompts, n_decode + n_prompts * n_tokens
        n_values, n_heads = CONFIG.n_value_heads * CONFIG.value_dim, CONFIG.n_value_heads
        projected = normal(total, CONFIG.n_channels + n_values + 2 * n_heads)
        weights = RecurrentWeights(
            inputs=LinearWeights(projected),
            convolution=normal(CONFIG.n_channels, CONFIG.n_taps),
            log_decay=torch.zeros(n_heads, device=DEVICE),
            decay_bias=torch.zeros(n_heads, device=DEVICE),
            norm=normal(CONFIG.value_dim),
        )
        states = LayerStates(
            normal(n_rows, CONFIG.n_taps - 1, CONFIG.n_channels),
            torch.zeros(n_rows, n_heads, CONFIG.key_dim, CONFIG.value_dim, device=DEVICE),
        )
        slots = np.arange(n_rows, dtype=np.int32)
        starts = np.full(n_rows, 64, np.int32)
        counts = np.where(slots < n_decode, 1, n_tokens).astype(np.int32)
        firsts = counts.cumsum(dtype=np.int32) - counts
        unused = [starts] * (len(RowArrays._fields) - 4)
        arrays = RowArrays(slots, starts, counts, firsts, *unused)
        prompts = None
        if n_prompts:
            found = block_arrays(arrays, n_decode, (), n_rows)
            prompts = BlockArrays(*(torch.from_numpy(array).to(DEVICE) for array in found))
        on_device = (torch.from_numpy(array[:n_decode]).to(DEVICE) for array in (slots, starts))
        return cls(
            projected,
            normal(total, CONFIG.n_channels) * 0.1,
            torch.empty(total, n_heads, CONFIG.value_dim, dtype=DTYPE, device=DEVICE),
            weights,
            states,
            DeviceSequences(n_rows, *on_device, prompts),
        )

    def parts(self) -> dict[str, tuple[Callable[[], object], int]]:
        """Returns each kernel with the bytes that it must move."""
        gates = self.weights.log_decay, self.weights.decay_bias
        prompts, memory = self.sequences.prompts, self.states.memory
        projected, convolved, out = self.projected, self.convolved, self.out
        gate = projected[:, CONFIG.n_channels : CONFIG.n_channels + out[0].numel()]
        x_bytes = 2 * len(projected) * CONFIG.n_channels
        layer, read = GatedDeltaNet(self.weights, Linear(projected, None), CONFIG, 1e-6), out.flatten(1)

        def run_layer() -> None:
            layer.scan(projected, self.sequences, self.states, read)
            layer.finish(projected, read)

        state_bytes = 2 * memory.nbytes
        found: dict[str, tuple[Callable[[], object], int]] = {
            "layer": (run_layer, projected.nbytes + out.nbytes + state_bytes),
            "convolve": (
                partial(
                    convolve,
                    projected,
                    self.states.inputs,
                    self.weights.convolution,
                    self.sequences,
                    CONFIG,
                    convolved,
                ),
                2 * x_bytes,
            ),
            "gated_norm": (
                partial(gated_norm, out, gate, self.weights.norm, 1e-6, out.flatten(1)),
                3 * out.nbytes,
            ),
        }
        if prompts is None:
            step = partial(step_tokens, convolved, projected, *gates, memory, self.sequences, CONFIG, out)
            found["step"] = step, state_bytes + x_bytes + out.nbytes
        else:
            parts = block_parts(convolved, projected, *gates, prompts, CONFIG)
            n_bytes = len(prompts.blocks) * block_bytes(CONFIG, DTYPE)
            blocks = partial(block_parts, convolved, projected, *gates, prompts, CONFIG)
            found["blocks"] = blocks, x_bytes + n_bytes
            scan = partial(scan_blocks, convolved, parts, memory, prompts, CONFIG, len(memory), out)
            found["scan"] = scan, n_bytes + x_bytes // 2 + out.nbytes + state_bytes
        return found


def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument("--rounds", type=int, default=20, help="replays of each graph")
    parser.add_argument("--decode-rows", type=int, nargs="*", default=DECODE_ROWS)
    arguments = parser.parse_args()
    about = {"benchmark": "delta_nets", **gpu_provenance("cuda", arguments.commit)}
    with torch.inference_mode():
        for line in measure(arguments.decode_rows, arguments.rounds):
            report(arguments.output_file, line, about)


def measure(decode_rows: Sequence[int], n_rounds: int) -> Iterator[dict[str, object]]:
    """Yields the result lines."""
    for n_decode, n_prompts, n_tokens in [(n, 0, 0) for n in decode_rows] + [(0, *shape) for shape in PROMPTS]:
        first = Layer.of(n_decode, n_prompts, n_tokens)
        n_copies = 1 + min(200 * 10**6 // (first.projected.nbytes + first.states.memory.nbytes), 100)
        layers = [first, *(Layer.of(n_decode, n_prompts, n_tokens) for _ in range(n_copies - 1))]
        parts = [layer.parts() for layer in layers]
        for name, (_, n_bytes) in parts[0].items():
            case = Case(name, n_decode + n_prompts, n_bytes, [part[name][0] for part in parts])
            us = time_us(case.calls, n_rounds)
            line = line_of(case, us) | {"tokens_a_row": n_tokens or 1, "kind": "prompts" if n_prompts else "decode"}
            if n_prompts:
                products_us = 2e6 * MODEL_PARAMETERS * n_prompts * n_tokens / PRODUCT_FLOPS
                line |= {"share_of_step": round(len(CONFIG.layers) * us / products_us, 4)}
            yield line


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


if __name__ == "__main__":
    main()
