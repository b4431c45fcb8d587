"""Tests that an engine closes its device exactly once, and without the help of Python's collector."""

from __future__ import annotations

import gc
import weakref

import pytest

from radixkv import LLM, SamplingParams
from radixkv.errors import ConfigError
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.device.cpu.executor import CpuExecutor

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[CpuExecutor]:
    """A list to which each call of ``CpuExecutor.close`` appends its executor."""
    found: list[CpuExecutor] = []
    close = CpuExecutor.close

    def spy(self: CpuExecutor) -> None:
        found.append(self)
        close(self)

    monkeypatch.setattr(CpuExecutor, "close", spy)
    return found


def small() -> LLM:
    return LLM("tiny", device="cpu", max_total_tokens=256, max_model_len=256)


def test_shutdown_closes_the_device_once(closed: list[CpuExecutor]) -> None:
    llm = small()
    llm.generate("one two", GREEDY, use_tqdm=False)
    assert closed == []
    llm.shutdown()
    llm.shutdown()
    assert len(closed) == 1


def test_a_start_that_fails_after_the_device_was_opened_closes_it_once(
    closed: list[CpuExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PageCache, "__init__", no_memory)
    with pytest.raises(MemoryError):
        small()
    assert len(closed) == 1


def test_a_stream_fails_after_shutdown(closed: list[CpuExecutor]) -> None:
    llm = small()
    stream = llm.stream("one two", GREEDY)
    next(stream)
    llm.shutdown()
    with pytest.raises(ConfigError, match="this LLM was shut down"):
        next(stream)
    llm.shutdown()
    assert len(closed) == 1


def test_shutdown_frees_memory_at_once_even_during_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[CpuExecutor]] = []
    make = CpuExecutor.__init__

    def spy(self: CpuExecutor, *args: object, **settings: object) -> None:
        made.append(weakref.ref(self))
        make(self, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuExecutor, "__init__", spy)
    llm = small()
    stream = llm.stream("one two", GREEDY)
    next(stream)
    gc.collect()
    gc.disable()
    try:
        llm.shutdown()
        stream.close()
        assert made[0]() is None
    finally:
        gc.enable()
