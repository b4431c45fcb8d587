"""``LLM``: offline inference with the engine in the calling process."""

from radixkv.llm.adapters import LoRARequest
from radixkv.llm.llm import LLM
from radixkv.llm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from radixkv.llm.prompts import Message, Prompt

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "Message",
    "Prompt",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]
