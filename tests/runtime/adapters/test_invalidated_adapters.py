"""Which namespaces an invalidation means where there are adapters."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from radixkv.errors import InvalidRequest
from radixkv.runtime.intake import Intake
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.tree.marks import Marks
from radixkv.wire.cache_messages import Invalidate
from radixkv.wire.messages import WIRE_VERSION, Ready, pack_tokens
from radixkv.wire.namespace import CacheNamespace

READY = Ready(WIRE_VERSION, 1000, 200, 16, 64, 8, 64, "fake", "float32")


class LoadedAdapters(Adapters):
    """Has one adapter, and had another one."""

    names = MappingProxyType({"1" * 64: "sql", "2" * 64: "law"})

    def has(self, digest: str) -> bool:
        return digest == "1" * 64


def test_too_many_invocations_are_refused() -> None:
    """Each costs a search of its own."""
    marks = Marks()
    marks.add("1" * 64, [5])
    intake = Intake(READY, adapters=LoadedAdapters(), marks=marks)
    message = Invalidate("id", b"", CacheNamespace("", "hers", "1" * 64))
    assert len(list(intake.prefixes(message, pack_tokens([5] * 1023)))) == 1024
    with pytest.raises(InvalidRequest, match="'sql' occurs in this prompt more than 1023 times; invalidate"):
        intake.prefixes(message, pack_tokens([5] * 1024))


def meant(adapter: str | None) -> list[str]:
    intake = Intake(READY, adapters=LoadedAdapters(), marks=Marks())
    message = Invalidate("id", b"", CacheNamespace("", "hers", adapter or ""), all_adapters=adapter is None)
    return [one.adapter for one, _ in intake.prefixes(message, b"")]


def test_without_a_model_all_adapters_that_were_ever_loaded_are_meant() -> None:
    """Also those that no request has asked for since: the disk may have their pages of an earlier start."""
    assert meant(None) == ["", "1" * 64, "2" * 64]


def test_with_a_model_it_alone_is_meant() -> None:
    assert meant("") == [""]
    assert meant("2" * 64) == ["2" * 64]


def test_an_adapter_that_was_never_loaded_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is not loaded, or no longer"):
        meant("3" * 64)
