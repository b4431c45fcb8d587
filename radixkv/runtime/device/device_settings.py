"""The settings of a device: all that it needs to load a model and to size its pool and its steps."""

from __future__ import annotations

import msgspec

from radixkv.settings.config import AttentionBackend, KVCacheDtype, LoadFormat, Task


class AdapterSource(msgspec.Struct, frozen=True):
    """An adapter that the engine is started with."""

    name: str
    """By which requests ask for it."""
    path: str
    """Of its folder."""
    digest: str
    """Of what it computes."""
    max_rank: int
    """Most ranks that it may have."""
    n_values: int
    """Values of its matrices, or of each rank's parts of them."""
    invocation_tokens: tuple[int, ...] | None = None
    """Of an activated LoRA: it acts from their last occurrence in a prompt on; None: everywhere."""


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a device reads, with their defaults resolved. They can be sent to another process."""

    page_size: int
    """Tokens per page."""
    max_num_seqs: int
    """Most rows of a step, and number of batch slots."""
    max_num_batched_tokens: int
    """Most tokens of a step; the CPU computes steps of any size."""
    max_model_len: int
    """Most positions of a sequence."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool; None if ``gpu_memory_utilization`` decides. Never None on the CPU."""
    max_total_tokens: int | None = None
    """Size of the KV pool in tokens, before the other two settings; None if they decide."""
    state_memory_bytes: int = 0
    """Memory of the states of recurrent layers that the tree keeps; 0 for other models, and without the tree."""
    has_window_pages: bool = False
    """Whether layers with windows have pages of their own, in a model where others have none."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that may be used in all. No effect on the CPU."""
    dtype: str = "auto"
    """Dtype of weights and activations: ``float32`` or ``bfloat16`` on the CPU, ``bfloat16`` or
    ``float16`` on CUDA."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Dtype of the pool; ``auto`` is the dtype of activations."""
    quantization: str | None = None
    """``fp8`` rounds the layers' matrices to FP8; None, or the checkpoint's own format, does not."""
    load_format: LoadFormat = "auto"
    """``dummy`` creates random weights and reads no file except ``config.json``."""
    attention_backend: AttentionBackend = "auto"
    """Kernels of prefill on CUDA; ``auto`` is FlashInfer where it can be had."""
    tensor_parallel_size: int = 1
    """Ranks that compute the model together."""
    enforce_eager: bool = False
    """Whether CUDA runs without graphs."""
    task: Task = "generate"
    """What the checkpoint is for: with ``embed`` it needs no output head."""
    has_adapters: bool = False
    """Whether rows may have adapters: those of ``adapters``, and others that are loaded later."""
    max_lora_rank: int = 16
    """Most ranks of an adapter that is loaded later."""
    max_loras: int | None = None
    """Adapters that rows of one step may have, for which a GPU has memory; None: any number, on the CPU alone."""
    adapters: tuple[AdapterSource, ...] = ()
    """The adapters that rows may name by their digests from the start on."""
