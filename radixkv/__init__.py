"""radixkv: an LLM serving engine built around a radix tree of cached KV pages.

    from radixkv import LLM, SamplingParams

    llm = LLM("tiny")
    question = {"role": "user", "content": "What is 41 plus 11?"}
    for output in llm.chat([question], SamplingParams(temperature=0)):
        print(output.outputs[0].text, output.num_cached_tokens)

The names are imported on first use, so that the frontend process never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from radixkv.version import __version__

if TYPE_CHECKING:
    from radixkv.llm import (
        LLM,
        BeamSearchOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        LoRARequest,
        RequestOutput,
        ScoringRequestOutput,
    )
    from radixkv.wire.sampling import BeamSearchParams, SamplingParams
    from radixkv.wire.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in ("LLM", "LoRARequest") or name.endswith("Output"):
        return getattr(importlib.import_module("radixkv.llm"), name)
    if name in ("BeamSearchParams", "SamplingParams"):
        return getattr(importlib.import_module("radixkv.wire.sampling"), name)
    if name == "StructuredOutputs":
        return importlib.import_module("radixkv.wire.structured_outputs").StructuredOutputs
    raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
