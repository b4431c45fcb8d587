"""What Mooncake's codes mean, with a fake of its client; `make test-stores` has a real one."""

from __future__ import annotations

import asyncio

import pytest

from radixkv.runtime.tiers.stores.mooncake_objects import MooncakeObjects
from radixkv.runtime.tiers.stores.object_store import ObjectStoreError


class FakeClient:
    """Answers each call with the same code."""

    def __init__(self, code: int) -> None:
        self.code = code

    def put(self, name: str, value: memoryview) -> int:
        return self.code

    def remove(self, name: str, force: bool) -> int:
        return self.code

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [self.code for _ in names]


def objects_that_answer(code: int) -> MooncakeObjects:
    return MooncakeObjects(FakeClient(code), "x/")


@pytest.mark.parametrize(("code", "is_deleted"), [(0, True), (-704, True), (-703, False)])
def test_an_absent_object_counts_as_deleted_and_a_busy_one_does_not(code: int, is_deleted: bool) -> None:
    assert asyncio.run(objects_that_answer(code).delete("page")) == is_deleted


def test_a_master_that_does_not_answer_is_an_error() -> None:
    objects = objects_that_answer(-900)
    for call in (objects.delete("page"), objects.put("page", memoryview(b"1")), objects.have(["page"])):
        with pytest.raises(ObjectStoreError, match="-900"):
            asyncio.run(call)


def test_a_full_store_takes_no_object() -> None:
    assert not asyncio.run(objects_that_answer(-200).put("page", memoryview(b"1")))
