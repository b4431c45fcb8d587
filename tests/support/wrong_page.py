"""Pages taken for others, as a cache that mixes them up would have it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from radixkv.llm import LLM
from radixkv.runtime.device.executor_cpu import CpuExecutor
from radixkv.tree.node import Namespace


def pages_of(llm: LLM, prompt: Sequence[int]) -> list[int]:
    """Those in the cache that hold a prompt's KV, from its beginning."""
    cache = llm._live._scheduler.cache
    blocks = cache.open(Namespace(), array("i", prompt).tobytes())
    pages = list(blocks.pages)
    cache.close(blocks)
    return pages


@contextmanager
def mixed_up(llm: LLM, others: Mapping[int, int]) -> Iterator[None]:
    """In all layers, each page has the KV of the other that it is mapped to; afterwards its own again."""
    executor = llm._live._executor
    assert isinstance(executor, CpuExecutor)
    pages, sources = list(others), list(others.values())
    tensors = (executor.pool.k, executor.pool.v)
    kept = [tensor[:, pages].clone() for tensor in tensors]
    for tensor in tensors:
        tensor[:, pages] = tensor[:, sources]
    try:
        yield
    finally:
        for tensor, own in zip(tensors, kept, strict=True):
            tensor[:, pages] = own
