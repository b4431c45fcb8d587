"""A CPU device with accessible parts, and helpers to build rows for it."""

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.attention.cpu.paged import PagedAttention
from radixkv.runtime.device.cpu.persistent_batch import PersistentBatch
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.cpu.kv_pool import KVPool
from radixkv.runtime.device.memory.cpu.recurrent_states import RecurrentStates
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.model.decoder import Decoder
from radixkv.runtime.device.ops.cpu.operations import CpuOperations
from radixkv.runtime.device.pack import PackedStep, Packer
from radixkv.runtime.device.weights.open import open_weights
from radixkv.runtime.device.weights.parallel_load import in_pieces
from radixkv.runtime.step.plan import Row, RowSampling, StepPlan
from support.checkpoints import VOCAB
from support.poison import poison

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# Three active experts: the order of only two terms would not change their sum.
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

LLAMAS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "llama3": {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "num_attention_heads": 6},
    "whole": {"num_key_value_heads": 4, "head_dim": 10, "intermediate_size": 51},
    "biased": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", "sliding_window": 20},
    "qwen2": {
        "model_type": "qwen2",
        "head_dim": 12,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 13,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "rope_parameters": _YARN},
    "qwen3-biased": {
        "model_type": "qwen3",
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3-moe": {"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [1], **_EXPERTS},
    "qwen3-moe-alternating": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 40,
        **_EXPERTS,
    },
    "qwen3.5-attention": {
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["full_attention"] * 3,
        "shared_expert_intermediate_size": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        **_EXPERTS,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 20,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 5,
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma4-shared": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 32,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma4-unified": {
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": True,
    },
    "gemma4-moe": {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
        "tie_word_embeddings": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": _YARN | {"truncate": False},
    },
    "opt": {
        "model_type": "opt",
        "ffn_dim": 80,
        "word_embed_proj_dim": 48,
        "head_dim": 12,
        "num_key_value_heads": 4,
        "init_std": 0.2,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 17},
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 48,
    "patch_size": 4,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "qwen3.5-alternating": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", "linear_attention", "full_attention"]
        + ["linear_attention", "full_attention"],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    "qwen3.5-vision": {
        "model_type": "qwen3_5",
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "vision_config": _VISION,
    },
    "qwen3.5-moe": {
        "model_type": "qwen3_5_moe",
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 20,
        "vision_config": _VISION,
        **_EXPERTS,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [1],
        **_EXPERTS,
    },
    "nemotron-h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "mlp", "linear_attention"]
        + ["full_attention", "linear_attention"],
        "ssm_state_size": 8,
        "mamba_num_heads": 6,
        "mamba_head_dim": 10,
        "time_step_min": 1e-6,
        "n_groups": 2,
        "mlp_bias": True,
    },
    "nemotron-h-moe": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "time_step_min": 1e-6,
        "n_groups": 4,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
        "routed_scaling_factor": 2.5,
    },
}
"""Models with gated delta nets or layers of Mamba2, which keep states in place of K and V."""
CHECKPOINTS = LLAMAS | OTHERS
"""Config changes of small random checkpoints by name, chosen so that each covers other variants."""

INVARIANT = (
    *("grouped", "llama3", "whole", "qwen2", "mixtral", "qwen3-moe-alternating", "gemma3", "gpt-oss", "opt"),
    *("gemma4", "gemma4-shared", "gemma4-moe"),
)
"""Names of checkpoints that together cover every kind of layer."""


def load_oracle(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    kind = AutoModelForImageTextToText if "vision_config" in checkpoint.config else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(checkpoint.folder, dtype=dtype, attn_implementation="eager")
    return model


def tokens_of(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def random_ids(n: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limits memory to a gigabyte more than used now, so that code that trusts a corrupt count fails in seconds."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class OpenDevice:
    """The parts of the CPU device, assembled as in ``CpuExecutor``, with access to the logits of every token."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        page_size: int = 4,
        n_pages: int = 400,
        block_tokens: int = 256,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.page_size = page_size
        with open_weights(checkpoint, load_format="auto", dtype=dtype) as weights:
            config = weights.config
            self.kv_scales = None if kv_dtype is None else weights.kv_scales()
            self.model = Decoder(weights, CpuOperations(config, 1024), self.kv_scales)
        page = PageLayout.of(config, page_size, kv_dtype or dtype)
        self._states = None if config.recurrent is None else RecurrentStates(config.recurrent, 512, 0, dtype)
        self.pool = KVPool(page, n_pages, self._states)
        self.attention = PagedAttention(
            self.pool,
            n_heads=config.n_heads,
            windows=config.windows_within(1 << 30),
            scale=config.attention_scale,
            sinks=self.model.sinks,
            kv_scales=self.kv_scales,
            block_tokens=block_tokens,
        )
        settings = DeviceSettings(
            page_size=page_size, max_num_seqs=512, max_num_batched_tokens=1024, max_model_len=1024
        )
        self._packer = Packer(settings, n_pages, max_tokens=None)
        self.batch = PersistentBatch(max_rows=512, max_model_len=1024, page_size=page_size)
        self._free = list(range(n_pages))
        poison(self.pool, self._free)

    def pages(self, n_tokens: int) -> tuple[int, ...]:
        """Allocates poisoned pages for ``n_tokens``, in no particular order."""
        n = -(-n_tokens // self.page_size)
        return tuple(self._free.pop(len(self._free) * 3 // 7) for _ in range(n))

    def pack(self, *rows: Row) -> PackedStep:
        packed = self._packer.pack(StepPlan(0, rows))
        self.batch.update(packed)
        return packed

    def run(self, *rows: Row, shift: int = 0) -> list[Tensor]:
        """Runs one step and returns each row's logits, [tokens, vocab].

        Args:
            rows: of the step.
            shift: added to the positions of all tokens, as a mistake would.
        """
        with torch.inference_mode():
            packed = self.pack(*rows)
            self.attention.plan(self.batch.spans(packed))
            sequences = () if self._states is None else self._states.token_spans(packed.plan)
            inputs = self.batch.inputs(packed, sequences)
            inputs.positions.add_(shift)
            logits = self.model.logits(self.model(inputs, self.pool, self.attention)).float()
        return list(torch.split(logits, [row.n_tokens for row in rows]))

    def stored(self, pages: Sequence[int], n_tokens: int) -> Tensor:
        """Returns K and V of a sequence's first tokens, [2, layers, kv_heads, tokens, head_dim].

        Where layers have heads of several shapes, these follow one another, flat.
        """
        parts = []
        for part in self.pool.parts:
            both = torch.stack([part.k[:, list(pages)], part.v[:, list(pages)]])
            parts.append(both.transpose(2, 3).flatten(3, 4)[:, :, :, :n_tokens].clone())
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])


def row_of(
    ids: Sequence[int],
    pages: Sequence[int],
    *,
    batch_slot: int = 0,
    start: int = 0,
    stop: int | None = None,
    write_start: int | None = None,
    sampling: RowSampling | None = None,
) -> Row:
    """Returns the row that computes ``ids[start:stop]`` of a sequence whose block table is ``pages``."""
    row_ids = ids[start:stop]
    return Row(
        batch_slot=batch_slot,
        start=start,
        n_tokens=len(row_ids),
        tokens=tokens_of(row_ids),
        write_start=start if write_start is None else write_start,
        table_start=0,
        table_pages=tuple(pages),
        sampling=sampling,
    )


def logits_of(checkpoint: Checkpoint | Path, ids: Sequence[int], **settings: Any) -> Tensor:
    """Returns the logits of every token of a sequence that is computed alone, [tokens, vocab]."""
    device = OpenDevice(resolve(str(checkpoint)) if isinstance(checkpoint, Path) else checkpoint, **settings)
    (logits,) = device.run(row_of(ids, device.pages(len(ids))))
    return logits


class PieceLane:
    """Loads tensors into the CPU's memory in small pieces, as the lanes of a GPU copy through buffers."""

    def copy(self, source: Tensor, out: Tensor) -> None:
        if not out.is_contiguous():
            out.copy_(source)
            return
        for part, target in in_pieces(source, out, 24):
            assert part.numel() <= 24
            target.copy_(part)

    def read(self, source: Tensor) -> Tensor:
        out = torch.empty(source.shape, dtype=source.dtype)
        self.copy(source, out)
        return out


class PlainLane:
    """Loads tensors into the CPU's memory."""

    def copy(self, source: Tensor, out: Tensor) -> None:
        out.copy_(source)

    def read(self, source: Tensor) -> Tensor:
        return source.clone()
