"""What Mooncake's codes mean, with a fake of its client; `make test-stores` has a real one."""

from __future__ import annotations

import asyncio

import pytest

from radixkv.runtime.tiers.stores import mooncake_objects
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


@pytest.fixture
def objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MooncakeObjects:
    monkeypatch.setattr(mooncake_objects, "_addresses", lambda url: ("127.0.0.1", "127.0.0.1:50051"))
    monkeypatch.setattr(mooncake_objects, "_check_answers", lambda *arguments: None)
    monkeypatch.setattr(mooncake_objects, "_set_up", lambda *arguments: FakeClient(request.param))
    return MooncakeObjects("mooncake://127.0.0.1:50051/x")


@pytest.mark.parametrize(("objects", "is_deleted"), [(0, True), (-704, True), (-703, False)], indirect=["objects"])
def test_an_absent_object_counts_as_deleted_and_a_busy_one_does_not(
    objects: MooncakeObjects, is_deleted: bool
) -> None:
    assert asyncio.run(objects.delete("page")) == is_deleted


@pytest.mark.parametrize("objects", [-900], indirect=True)
def test_a_master_that_does_not_answer_is_an_error(objects: MooncakeObjects) -> None:
    for call in (objects.delete("page"), objects.put("page", memoryview(b"1")), objects.have(["page"])):
        with pytest.raises(ObjectStoreError, match="-900"):
            asyncio.run(call)


@pytest.mark.parametrize("objects", [-200], indirect=True)
def test_a_full_store_takes_no_object(objects: MooncakeObjects) -> None:
    assert not asyncio.run(objects.put("page", memoryview(b"1")))
