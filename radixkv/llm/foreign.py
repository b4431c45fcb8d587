"""Settings that other engines have."""

from __future__ import annotations

from collections.abc import Mapping

from radixkv.errors import UnsupportedFeature

RENAMED = {
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "block_size": "page_size",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "disable_radix_cache": "enable_prefix_caching",
    "scheduling_policy": "schedule_policy",
    "random_seed": "seed",
}
"""Settings that other engines have, and what is called so here."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "trust_remote_code": (False,),
    "enable_lora": (False,),
    "enable_chunked_prefill": (True,),
    "disable_log_stats": (True, False),
}
"""Their values that ask for what this engine does anyway."""


def refuse(settings: Mapping[str, object]) -> None:
    """Raises ``UnsupportedFeature`` that names the settings unless all have neutral values."""
    for name in settings:
        if name in RENAMED:
            raise UnsupportedFeature(f"LLM has no setting {name}; use {RENAMED[name]}")
    refused = sorted(name for name, value in settings.items() if not _is_neutral(name, value))
    if refused:
        raise UnsupportedFeature(f"LLM has no setting {', '.join(refused)} in this release; leave it out")


def _is_neutral(name: str, value: object) -> bool:
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, ()))
